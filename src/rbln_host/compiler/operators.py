# SPDX-License-Identifier: Apache-2.0
"""Which operators a program may hold, and how a name in a file becomes a callable.

Programs are data that may come from elsewhere, so a name is resolved only inside the ``aten`` and
``rbln`` namespaces, and operators that are not computations on tensors, or that reach outside
them (files, storages, generators, the interpreter's state), are refused.
"""

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverloadPacket

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_host.errors import ArtifactError

NAMESPACES = ("aten", "rbln")
_FORBIDDEN_TYPES = ("Storage", "Stream", "Generator", "Dimname", "PyObject")
_FORBIDDEN_NAMES = ("from_file", "set_", "resize", "as_strided", "unsafe", "_foreach", "record")
_RESULT_TYPES = ("Tensor", "List[Tensor]")
_FRESH = frozenset(
    f"aten::{name}"
    for name in ("linear", "matmul", "layer_norm", "rms_norm", "scaled_dot_product_attention")
)
"""Composite operators whose result never shares memory with an input."""


@cache
def resolve(operator: str, overload: str) -> Any:
    """The ``OpOverload`` called ``operator`` (``"aten::mul"``) and ``overload``.

    Raises ArtifactError for a name that does not exist or that programs may not use.
    """
    namespace, separator, name = operator.partition("::")
    if not separator or namespace not in NAMESPACES or not name.isidentifier():
        raise ArtifactError(f"operator {operator!r} is outside the namespaces {NAMESPACES}")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket) or overload not in packet.overloads():
        raise ArtifactError(f"operator {operator}.{overload} does not exist")
    function = getattr(packet, overload)
    reason = refusal(function)
    if reason:
        raise ArtifactError(f"operator {operator}.{overload} may not be used: {reason}")
    return function


@cache
def refusal(function: Any) -> str | None:
    """Why a program may not use this operator, or None when it may."""
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    if any(part in name for part in _FORBIDDEN_NAMES):
        return "it can reach memory or files outside its tensors"
    for argument in schema.arguments:
        if any(kind in str(argument.type) for kind in _FORBIDDEN_TYPES):
            return f"its argument {argument.name} is a {argument.type}"
    if namespace == "aten" and not _computes_tensors(function):
        return "its results are not tensors; a program has fixed sizes and no control flow"
    return None


def _computes_tensors(function: Any) -> bool:
    """Whether it is an operator of torch's dispatcher whose results are all tensors.

    TorchScript's own functions (``aten::save``, ``aten::warn``, ``aten::set_grad_enabled``) are
    reachable by the same name and are not in the dispatcher.
    """
    returns = function._schema.returns
    tensors = bool(returns) and all(str(result.type) in _RESULT_TYPES for result in returns)
    return tensors and torch._C._dispatch_has_kernel(function.name())


@cache
def is_pure(operator: str, overload: str) -> bool:
    """Whether equal inputs give equal outputs and nothing else changes."""
    function = resolve(operator, overload)
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        return False
    return not is_uninitialised(operator)


def is_uninitialised(operator: str) -> bool:
    """Whether it only allocates: its result may be dropped when unread, but never shared."""
    return "empty" in operator


@cache
def may_alias(operator: str, overload: str) -> bool:
    """Whether an output may share memory with an input.

    Composite operators (``dropout``, ``type_as``, ``einsum``, ``broadcast_tensors``) may return
    an input or a view of it although their schema does not say so.
    """
    function = resolve(operator, overload)
    if any(result.alias_info is not None for result in function._schema.returns):
        return True
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return operator not in _FRESH and bool(function.has_kernel_for_dispatch_key(composite))
