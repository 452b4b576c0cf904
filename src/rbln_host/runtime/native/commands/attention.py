# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, the KV pool and attention."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand


def _rotary(call: Call) -> list[NativeCommand]:
    operands = (call["input_NHD"], call["positions_N"], call["cos_sin_PR"], call.output())
    return [NativeCommand("rotary", operands, {"neox": call.number("neox")})]


def _rotary_write_kv(call: Call) -> list[NativeCommand]:
    vectors = (call["query_NHD"], call["key_NHD"], call["value_NHD"])
    table = (call["positions_N"], call["cos_sin_PR"])
    operands = (*vectors, *table, call["kv_cache"], call["slots_N"], call.output())
    return [NativeCommand("rotary_write_kv", operands, {"neox": call.number("neox")})]


def _write_kv(call: Call) -> list[NativeCommand]:
    names = ("key_NHD", "value_NHD", "kv_cache", "slots_N")
    return [NativeCommand("write_kv", tuple(call[name] for name in names))]


def _paged_attention(call: Call) -> list[NativeCommand]:
    operands = (
        *(call[name] for name in ("query_NHD", "kv_cache", "block_table_BT", "query_pos_N")),
        call.optional("sinks_H"),
        call.optional("alibi_slopes_H"),
        call.output(),
    )
    numbers = {name: call.number(name) for name in ("scale", "window", "soft_cap")}
    return [NativeCommand("paged_attention", operands, numbers)]


def _encoder_attention(call: Call) -> list[NativeCommand]:
    names = ("query_NHD", "key_NHD", "value_NHD", "row_starts_S")
    operands = (*(call[name] for name in names), call.output())
    return [NativeCommand("encoder_attention", operands, {"scale": call.number("scale")})]


BUILDERS: Mapping[str, Builder] = {
    "rbln::rotary_embedding": _rotary,
    "rbln::rotary_write_kv": _rotary_write_kv,
    "rbln::write_kv": _write_kv,
    "rbln::paged_attention": _paged_attention,
    "rbln::encoder_attention": _encoder_attention,
}
