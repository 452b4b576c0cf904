# SPDX-License-Identifier: Apache-2.0
"""The best token, masks of tokens, and tokens that are drawn."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand, Unclaimed
from rbln_host.runtime.native.operands import rows_of


def _argmax(call: Call) -> list[NativeCommand]:
    source, out = call["self"], call.output()
    axes = len(source.shape)
    last = call.value("dim") in (-1, axes - 1) or (call.value("dim") is None and axes == 1)
    if not last:
        raise Unclaimed("it does not reduce the last axis alone")
    (x,) = rows_of(source)
    flat = out.viewed((out.size,))
    if flat is None or len(x.shape) != 2:
        raise Unclaimed("its rows do not lie evenly")
    return [NativeCommand("argmax", (x, flat))]


def _mask_tokens(call: Call) -> list[NativeCommand]:
    return [NativeCommand("mask_tokens", (call["bitmask_RW"], call["logits_RV"]))]


def _sample(call: Call) -> list[NativeCommand]:
    names = ("logits_RV", "temperature_R", "top_k_R", "top_p_R", "seed_R", "position_R")
    operands = (*(call[name] for name in names), call.optional("bitmask_RW"))
    return [NativeCommand("sample", (*operands, call.output(0), call.output(1)))]


BUILDERS: Mapping[str, Builder] = {
    "rbln::mask_tokens": _mask_tokens,
    "rbln::sample": _sample,
    "aten::argmax": _argmax,
}
