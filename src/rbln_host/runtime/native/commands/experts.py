# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand


def _route(call: Call) -> list[NativeCommand]:
    operands = (call["logits_NE"], call.output(0), call.output(1))
    return [NativeCommand("route", operands, {"renormalise": call.number("renormalise")})]


def _gated_experts(call: Call) -> list[NativeCommand]:
    weights = (call.weight("gate_up_EGH"), call.optional("bias_EG"))
    operands = (call["input_NH"], *weights, call["experts_NS"], call.output())
    numbers = {name: call.number(name) for name in ("limit", "offset")}
    return [NativeCommand("gated_experts", operands, numbers, call.text("activation"))]


def _combine_experts(call: Call) -> list[NativeCommand]:
    weights = (call.weight("down_EHI"), call.optional("bias_EH"))
    routed = (call["experts_NS"], call["weights_NS"])
    operands = (call["gated_NSI"], *weights, *routed, call.output())
    return [NativeCommand("combine_experts", operands)]


BUILDERS: Mapping[str, Builder] = {
    "rbln::route": _route,
    "rbln::gated_experts": _gated_experts,
    "rbln::combine_experts": _combine_experts,
}
