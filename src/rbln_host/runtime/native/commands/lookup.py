# SPDX-License-Identifier: Apache-2.0
"""Rows of tables, which may be packed."""

from collections.abc import Mapping

from rbln_host.runtime.native.commands.call import Builder, Call, NativeCommand, Unclaimed
from rbln_host.runtime.native.operands import Operand


def _embedding(call: Call) -> list[NativeCommand]:
    return _lookup(call, "weight", call["indices"])


def _index_select(call: Call) -> list[NativeCommand]:
    if call.value("dim") not in (0, -len(call["self"].shape)):
        raise Unclaimed("it selects along another axis than the first")
    return _lookup(call, "self", call["index"])


def _lookup(call: Call, table: str, ids: Operand) -> list[NativeCommand]:
    """Rows of a table of any width, which may be packed."""
    found = call.packed(table)
    operand, spec = found or (call[table], None)
    if len(spec.shape if spec else operand.shape) != 2:
        raise Unclaimed("its table is not a matrix")
    rows, width = spec.shape if spec else operand.shape
    numbers = {"packed": float(spec is not None), "rows": float(rows), "width": float(width)}
    flat, out = ids.viewed((ids.size,)), call.output().viewed((ids.size, width))
    if flat is None or out is None:
        raise Unclaimed("its ids or its result have gaps")
    return [NativeCommand("embedding", (operand, flat, out), numbers)]


BUILDERS: Mapping[str, Builder] = {
    "aten::embedding": _embedding,
    "aten::index_select": _index_select,
}
