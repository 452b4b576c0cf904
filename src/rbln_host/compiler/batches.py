# SPDX-License-Identifier: Apache-2.0
"""Programs that differ in batch size alone, from one export of the module.

Exporting a model costs seconds, whatever its batch. So it is exported once with the batch as a
symbol, and each program is that export with the symbol replaced by a number: the result is as
static as if it had been exported at that size.
"""

import logging
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

_logger = logging.getLogger(__name__)


def capture_batches(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    names: Mapping[int, str],
    batch_axes: Mapping[str, int],
    free_axes: Mapping[str, int] | None = None,
) -> list[Captured]:
    """Capture one program for each batch size in ``names`` (size -> program name).

    ``inputs`` are examples of any batch size; ``batch_axes`` names the axis of each input that
    is the batch. A module that cannot be captured with a symbolic batch (it branches on the size,
    or computes fractions from it) is exported once per size. Raises CaptureError as
    :func:`capture` does.
    """
    if len(names) > 1:
        try:
            return _from_one_export(module, inputs, names, batch_axes, free_axes or {})
        except CaptureError as error:
            _logger.debug("Exporting once per batch size: %s", error)
    return [
        capture(module, _resized(inputs, batch_axes, size), name, free_axes)
        for size, name in names.items()
    ]


def _from_one_export(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    names: Mapping[int, str],
    batch_axes: Mapping[str, int],
    free_axes: Mapping[str, int],
) -> list[Captured]:
    batch = torch.export.Dim("batch", min=min(names), max=max(names))
    # At size 1 the exporter would take the batch for a constant.
    examples = _resized(inputs, batch_axes, max(names))
    shapes = {name: {batch_axes[name]: batch} if name in batch_axes else None for name in examples}
    exported = export_module(module, examples, next(iter(names.values())), shapes)
    symbols = _batch_symbols(exported, batch_axes)
    canonical = canonical_names(named_tensors(module))
    return [
        read_program(exported, name, free_axes, canonical, dict.fromkeys(symbols, size))
        for size, name in names.items()
    ]


def _batch_symbols(exported: Any, batch_axes: Mapping[str, int]) -> set[Any]:
    """The symbols that stand for the batch; CaptureError when one was replaced by a constant."""
    keywords = exported.call_spec.in_spec.child(1).context
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    values = dict(zip(keywords, placeholders[-len(keywords) :], strict=True))
    sizes = [values[name].meta["val"].shape[axis] for name, axis in batch_axes.items()]
    if not all(isinstance(size, torch.SymInt) for size in sizes):
        raise CaptureError("the model fixes the size of its batch")
    return {size.node.expr for size in sizes}


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
