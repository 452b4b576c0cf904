# SPDX-License-Identifier: Apache-2.0
"""Copies: into another dtype, order, shape or place."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand, Unclaimed
from rbln_host.runtime.native.operands import MAX_AXES, Operand, coalesced


def _copy(source: Operand, target: Operand) -> NativeCommand:
    operands = coalesced(source.expanded(target.shape), target)
    if len(operands[0].shape) > MAX_AXES:
        raise Unclaimed("it has too many axes")
    return NativeCommand("copy", tuple(operands))


def _write(call: Call) -> list[NativeCommand]:
    """``copy_``: the result is the first argument."""
    return [_copy(call["src"], call["self"])]


def _converted(call: Call) -> list[NativeCommand]:
    """A copy in another dtype, order or place."""
    return [_copy(call["self"], call.output())]


def _reshaped(call: Call) -> list[NativeCommand]:
    """A copy whose shape is another: the target is seen in the source's shape."""
    source = call["self"]
    target = call.output().viewed(source.shape)
    if target is None:
        raise Unclaimed("its result has gaps")
    return [_copy(source, target)]


def _cat(call: Call) -> list[NativeCommand]:
    out, parts = call.output(), call.tensors("tensors")
    axis, place = _axis(call, len(out.shape)), 0
    commands = []
    for part in parts:
        if len(part.shape) != len(out.shape):
            continue  # an empty vector, which joins anything
        size = part.shape[axis]
        commands.append(_copy(part, out.part(axis, place, size)))
        place += size
    return commands


def _stack(call: Call) -> list[NativeCommand]:
    out, parts = call.output(), call.tensors("tensors")
    axis = _axis(call, len(out.shape))
    places = [out.part(axis, index, 1) for index in range(len(parts))]
    return [_copy(part.inserted(axis), place) for part, place in zip(parts, places, strict=True)]


def _axis(call: Call, axes: int) -> int:
    """The argument ``dim``, counted from the front."""
    dim = call.value("dim")
    if not isinstance(dim, int):
        raise Unclaimed("dim is not a number")
    return dim % axes


BUILDERS: Mapping[str, Builder] = {
    "aten::copy_": _write,
    "aten::to": _converted,
    "aten::_to_copy": _converted,
    "aten::clone": _converted,
    "aten::contiguous": _converted,
    "aten::reshape": _reshaped,
    "aten::flatten": _reshaped,
    "aten::cat": _cat,
    "aten::stack": _stack,
}
