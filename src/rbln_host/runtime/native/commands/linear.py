# SPDX-License-Identifier: Apache-2.0
"""Linears, and linears whose rows have adapters."""

from collections.abc import Mapping
from dataclasses import replace

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand
from rbln_host.runtime.native.operands import rows_of


def _linear(call: Call) -> list[NativeCommand]:
    residual, text = call.optional("residual_NO"), call.text("activation")
    x, out, *added = rows_of(call["input_NK"], call.output(), *([residual] if residual else []))
    bias, residual = call.optional("bias_O"), added[0] if added else None
    operands = (x, call.weight("weight_OK"), bias, residual, out)
    return [NativeCommand("linear", operands, text=text)]


def _gated_linear(call: Call) -> list[NativeCommand]:
    x, out = rows_of(call["input_NK"], call.output())
    operands = (x, call.weight("weight_GK"), call.optional("bias_G"), out)
    return [NativeCommand("gated_linear", operands, text=call.text("activation"))]


def _lora_shrink(call: Call) -> list[NativeCommand]:
    (x,) = rows_of(call["input_NK"])
    operands = (x, call["slots_N"], call["ranks_MS"], *call.tensors("a_SRK"), call.output())
    return [NativeCommand("lora_shrink", operands, _part_numbers(call, "modules"))]


def _lora_linear(call: Call) -> list[NativeCommand]:
    (plain,) = _linear(call)
    return [_with_adapters(call, plain)]


def _lora_gated_linear(call: Call) -> list[NativeCommand]:
    (plain,) = _gated_linear(call)
    return [_with_adapters(call, plain)]


def _with_adapters(call: Call, plain: NativeCommand) -> NativeCommand:
    """A linear whose adapters come before its output."""
    given = (call["shrunk_NR"], call["slots_N"], call["ranks_MS"], *call.tensors("b_SGR16"))
    operands = (*plain.operands[:-1], *given, *plain.operands[-1:])
    numbers = _part_numbers(call, "modules", "starts", "sizes")
    return replace(plain, op=f"lora_{plain.op}", operands=operands, numbers=numbers)


def _part_numbers(call: Call, *names: str) -> dict[str, float]:
    """Lists of one number for each part, as ``modules.0`` and so on."""
    lists = {name: call.numbers(name) for name in names}
    numbers = {f"{name}.{i}": v for name, values in lists.items() for i, v in enumerate(values)}
    return {"parts": float(len(lists[names[0]])), **numbers}


BUILDERS: Mapping[str, Builder] = {
    "rbln::linear": _linear,
    "rbln::gated_linear": _gated_linear,
    "rbln::lora_shrink": _lora_shrink,
    "rbln::lora_linear": _lora_linear,
    "rbln::lora_gated_linear": _lora_gated_linear,
}
