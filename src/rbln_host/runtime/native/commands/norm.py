# SPDX-License-Identifier: Apache-2.0
"""Norms of rows."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand
from rbln_host.runtime.native.operands import rows_of


def _norm_numbers(call: Call) -> dict[str, float]:
    return {"epsilon": call.number("epsilon"), "variance_size": call.number("variance_size")}


def _rms_norm(call: Call) -> list[NativeCommand]:
    x, out = rows_of(call["hidden_NH"], call.output())
    return [NativeCommand("rms_norm", (x, call.optional("weight_H"), out), _norm_numbers(call))]


def _add_rms_norm(call: Call) -> list[NativeCommand]:
    x, residual, out, total = rows_of(
        call["hidden_NH"], call["residual_NH"], call.output(0), call.output(1)
    )
    operands = (x, residual, call.optional("weight_H"), out, total)
    return [NativeCommand("add_rms_norm", operands, _norm_numbers(call))]


def _layer_norm(call: Call) -> list[NativeCommand]:
    x, out = rows_of(call["hidden_NH"], call.output())
    operands = (x, call.optional("weight_H"), call.optional("bias_H"), out)
    return [NativeCommand("layer_norm", operands, {"epsilon": call.number("epsilon")})]


BUILDERS: Mapping[str, Builder] = {
    "rbln::rms_norm": _rms_norm,
    "rbln::fused_add_rms_norm": _add_rms_norm,
    "rbln::layer_norm": _layer_norm,
}
