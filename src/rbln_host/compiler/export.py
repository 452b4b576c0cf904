# SPDX-License-Identifier: Apache-2.0
"""``torch.export`` of a module, with what the exporter needs to see in models as they are."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import _config as symbolic_shapes
from torch.overrides import TorchFunctionMode

from rbln_host.errors import CaptureError


def export_module(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    name: str,
    dynamic_shapes: dict[str, Any] | None = None,
) -> Any:
    """``torch.export`` of ``module(**inputs)``; CaptureError when it fails.

    Of a symbolic size nothing is assumed: without ``backed_size_oblivious`` the exporter takes it
    to be at least 2, and what the module does at size 1 is lost without a word.
    """
    try:
        with (
            symbolic_shapes.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            _traceable_data(),
            _explicit_signature(module, inputs),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            # The step's KV pool is put into the layers on purpose; it is an input.
            warnings.filterwarnings("ignore", message="The tensor attributes? ")
            return torch.export.export(
                module, (), dict(inputs), strict=False, dynamic_shapes=dynamic_shapes
            )
    except Exception as error:  # torch.export raises nearly every type there is
        raise CaptureError(
            f"program {name}: the model cannot be captured as a static program: {error}"
        ) from error


@contextmanager
def _explicit_signature(module: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Let the exporter see one parameter for each input of a ``forward(**inputs)``.

    It cannot match symbolic shapes with a parameter that takes any keyword.
    """
    forward, own = module.forward, vars(module).get("forward")

    def named(**inputs: Any) -> Any:
        return forward(**inputs)

    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword) for name in names]
    )
    module.forward = named
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def _traceable_data() -> Iterator[None]:
    """``tensor.data`` hides a tensor from the tracer; read it as ``tensor.detach()`` instead."""
    data_getter = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    class DetachData(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func == data_getter:
                return args[0].detach()
            return func(*args, **(kwargs or {}))

    with DetachData():
        yield
