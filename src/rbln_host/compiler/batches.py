# SPDX-License-Identifier: Apache-2.0
"""Programs that differ in batch size alone, from one export of the module.

Exporting a model costs seconds, whatever its batch. So it is exported once with the batch as a
symbol, and each program is that export with the symbol replaced by a number: the result is as
static as if it had been exported at that size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rbln_host.compiler.capture import (
    Captured,
    canonical_names,
    capture,
    named_tensors,
    read_program,
)
from rbln_host.compiler.export import export_module
from rbln_host.errors import CaptureError


def capture_batches(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    names: Mapping[int, str],
    batch_axes: Mapping[str, int],
    free_axes: Mapping[str, int] | None = None,
) -> list[Captured]:
    """Capture one program for each batch size in ``names`` (size -> program name).

    ``inputs`` are examples of any batch size; ``batch_axes`` names the axis of each input that
    is the batch. A module that does not export with a symbolic batch (it branches on the size)
    is exported once per size. Raises CaptureError as :func:`capture` does.
    """
    if len(names) > 1:
        exported = _export_symbolic(module, inputs, names, batch_axes)
        if exported is not None:
            return _instances(module, exported, names, batch_axes, free_axes or {})
    return [
        capture(module, _resized(inputs, batch_axes, size), name, free_axes)
        for size, name in names.items()
    ]


def _export_symbolic(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    names: Mapping[int, str],
    batch_axes: Mapping[str, int],
) -> Any:
    """The export with a symbolic batch, None when the module does not allow one."""
    batch = torch.export.Dim("batch", min=min(names), max=max(names))
    # At size 1 the exporter would take the batch for a constant.
    examples = _resized(inputs, batch_axes, max(names))
    shapes = {name: {batch_axes[name]: batch} if name in batch_axes else None for name in examples}
    try:
        exported = export_module(module, examples, next(iter(names.values())), shapes)
    except CaptureError:
        return None
    return exported if _batch_symbols(exported, batch_axes) else None


def _batch_symbols(exported: Any, batch_axes: Mapping[str, int]) -> set[Any]:
    """The symbols that stand for the batch; empty when one was replaced by a constant."""
    keywords = exported.call_spec.in_spec.child(1).context
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    values = dict(zip(keywords, placeholders[-len(keywords) :], strict=True))
    sizes = [values[name].meta["val"].shape[axis] for name, axis in batch_axes.items()]
    if not all(isinstance(size, torch.SymInt) for size in sizes):
        return set()
    return {size.node.expr for size in sizes}


def _instances(
    module: torch.nn.Module,
    exported: Any,
    names: Mapping[int, str],
    batch_axes: Mapping[str, int],
    free_axes: Mapping[str, int],
) -> list[Captured]:
    symbols = _batch_symbols(exported, batch_axes)
    canonical = canonical_names(named_tensors(module))
    return [
        read_program(exported, name, free_axes, canonical, dict.fromkeys(symbols, size))
        for size, name in names.items()
    ]


def _resized(
    inputs: Mapping[str, Tensor], batch_axes: Mapping[str, int], size: int
) -> dict[str, Tensor]:
    """The examples at another batch size; their values do not matter."""
    resized = dict(inputs)
    for name, axis in batch_axes.items():
        shape = list(inputs[name].shape)
        shape[axis] = size
        resized[name] = inputs[name].new_zeros(shape)
    return resized
