# SPDX-License-Identifier: Apache-2.0
"""What looks at one element at a time."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand
from rbln_host.runtime.native.operands import coalesced, rows_of


def _elementwise(call: Call) -> list[NativeCommand]:
    out = call.output()
    expanded = [operand.expanded(out.shape) for operand in call.tensors("inputs")]
    operands = coalesced(*expanded, out)
    return [NativeCommand("elementwise", tuple(operands), text=call.text("program"))]


def _gated_activation(call: Call) -> list[NativeCommand]:
    operands = rows_of(call["gate_up_NG"], call.output())
    return [NativeCommand("gated_activation", tuple(operands), text=call.text("activation"))]


BUILDERS: Mapping[str, Builder] = {
    "rbln::gated_activation": _gated_activation,
    "rbln::elementwise": _elementwise,
}
