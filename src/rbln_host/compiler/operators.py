# SPDX-License-Identifier: Apache-2.0
"""Which operators a program may hold, and how a name in a file becomes a callable.

Programs are data that may come from elsewhere, so a name is resolved only inside the ``aten`` and
``rbln`` namespaces, and operators that reach outside their tensors (files, storages, generators)
are refused.
"""

from functools import cache
from typing import Any

import torch

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_host.errors import ArtifactError

NAMESPACES = ("aten", "rbln")
_FORBIDDEN_TYPES = ("Storage", "Stream", "Generator", "Dimname", "PyObject")
_FORBIDDEN_NAMES = ("from_file", "set_", "resize", "as_strided", "unsafe", "_foreach", "record")


@cache
def resolve(operator: str, overload: str) -> Any:
    """The ``OpOverload`` called ``operator`` (``"aten::mul"``) and ``overload``.

    Raises ArtifactError for a name that does not exist or that programs may not use.
    """
    namespace, separator, name = operator.partition("::")
    if not separator or namespace not in NAMESPACES or not name.isidentifier():
        raise ArtifactError(f"operator {operator!r} is outside the namespaces {NAMESPACES}")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or overload not in packet.overloads():
        raise ArtifactError(f"operator {operator}.{overload} does not exist")
    function = getattr(packet, overload)
    reason = refusal(function)
    if reason:
        raise ArtifactError(f"operator {operator}.{overload} may not be used: {reason}")
    return function


def refusal(function: Any) -> str | None:
    """Why a program may not use this operator, or None when it may."""
    schema = function._schema
    name = schema.name.partition("::")[2]
    if any(part in name for part in _FORBIDDEN_NAMES):
        return "it can reach memory or files outside its tensors"
    for argument in schema.arguments:
        if any(kind in str(argument.type) for kind in _FORBIDDEN_TYPES):
            return f"its argument {argument.name} is a {argument.type}"
    return None


@cache
def is_pure(operator: str, overload: str) -> bool:
    """Whether equal inputs give equal outputs and nothing else changes."""
    function = resolve(operator, overload)
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        return False
    return "empty" not in operator


def is_view(operator: str, overload: str) -> bool:
    """Whether an output may share memory with an input."""
    return any(
        result.alias_info is not None for result in resolve(operator, overload)._schema.returns
    )
