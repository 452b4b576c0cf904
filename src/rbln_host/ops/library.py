# SPDX-License-Identifier: Apache-2.0
"""The ``rbln::`` operator library and the decorator that adds an operator to it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

NAMESPACE = "rbln"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def define(schema: str, *, meta: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register the decorated function as the eager reference of ``rbln::<schema>``.

    ``meta`` takes the same arguments as fake tensors and gives the result's shape and dtype,
    so that the operator can be captured without running.
    """
    name = schema.partition("(")[0]

    def register(reference: _Function) -> _Function:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", meta, lib=_LIBRARY)
        return reference

    return register
