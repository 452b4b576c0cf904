# SPDX-License-Identifier: Apache-2.0
"""Which native command does the work of a program's command: one small function per operator.

Each raises :class:`Unclaimed`, with the reason, for what the kernels do not take; such a command
falls back to torch. What is refused here is what cannot be expressed; dtypes, strides and sizes
are checked by the kernels themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rbln_host.compiler.arguments import arguments_of
from rbln_host.compiler.graph import Command, Ref, TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.plan import Plan
from rbln_host.runtime.native.operands import (
    MAX_AXES,
    Operand,
    coalesced,
    operand_of,
    rows_of,
    weight_operand,
)


class Unclaimed(Exception):  # noqa: N818 (an answer, not an error)
    """No native command does this one's work; says why."""


@dataclass(frozen=True)
class NativeCommand:
    """A kernel with its operands, outputs last. None stands for an optional one that is absent."""

    op: str
    operands: tuple[Operand | None, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    by_token: bool = False
    """Whether a run may leave out rows of padding, see tokens.py."""


@dataclass(frozen=True)
class Site:
    """The program around a command: where values lie, and the weights that are there packed."""

    plan: Plan
    values: Mapping[str, str]
    """Value -> weight, as in the program."""
    packed: Mapping[str, TensorSpec]
    """Weights with a packed copy."""


class _Call:
    """A command's arguments as operands and plain values."""

    def __init__(self, command: Command, site: Site) -> None:
        self._command, self._site = command, site
        self._arguments = arguments_of(command)

    def __getitem__(self, name: str) -> Operand:
        """The tensor argument called ``name``."""
        found = self.optional(name)
        if found is None:
            raise Unclaimed(f"{name} is not a tensor")
        return found

    def optional(self, name: str) -> Operand | None:
        argument = self._arguments.get(name)
        return operand_of(self._site.plan, argument.name) if isinstance(argument, Ref) else None

    def tensors(self, name: str) -> list[Operand]:
        """A list of tensors."""
        return [operand_of(self._site.plan, item.name) for item in self._arguments[name]]

    def packed(self, name: str) -> tuple[Operand, TensorSpec] | None:
        """The packed copy of the weight that ``name`` is, and the weight's own shape."""
        argument = self._arguments.get(name)
        weight = self._site.values.get(argument.name) if isinstance(argument, Ref) else None
        spec = self._site.packed.get(weight) if weight is not None else None
        if weight is None or spec is None:
            return None
        return weight_operand(weight, spec, Layout.ROWS16), spec

    def weight(self, name: str) -> Operand:
        found = self.packed(name)
        if found is None:
            raise Unclaimed("its weight is not a packed one")
        return found[0]

    def number(self, name: str) -> float:
        value = self._arguments[name]
        if not isinstance(value, bool | int | float):
            raise Unclaimed(f"{name} is not a number")
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        return [float(item) for item in self._arguments[name]]

    def text(self, name: str) -> str:
        return str(self._arguments[name])

    def value(self, name: str) -> object:
        return self._arguments.get(name)

    def output(self, index: int = 0) -> Operand:
        name = self._command.outputs[index]
        if name is None:
            raise Unclaimed("its result is not named")
        return operand_of(self._site.plan, name)


def claim(command: Command, site: Site) -> tuple[NativeCommand, ...]:
    """The native commands that do the work of ``command``, in order; none when there is none to do.

    Raises Unclaimed.
    """
    build = _TABLE.get(command.operator)
    if build is None:
        raise Unclaimed("no kernel does this")
    commands = build(_Call(command, site))
    return tuple(c for c in commands if all(o is None or o.size for o in c.operands[-1:]))


def _linear(call: _Call) -> list[NativeCommand]:
    residual, text = call.optional("residual_NO"), call.text("activation")
    x, out, *added = rows_of(call["input_NK"], call.output(), *([residual] if residual else []))
    bias, residual = call.optional("bias_O"), added[0] if added else None
    operands = (x, call.weight("weight_OK"), bias, residual, out)
    return [NativeCommand("linear", operands, text=text)]


def _gated_linear(call: _Call) -> list[NativeCommand]:
    x, out = rows_of(call["input_NK"], call.output())
    operands = (x, call.weight("weight_GK"), call.optional("bias_G"), out)
    return [NativeCommand("gated_linear", operands, text=call.text("activation"))]


def _lora_shrink(call: _Call) -> list[NativeCommand]:
    (x,) = rows_of(call["input_NK"])
    operands = (x, call["slots_N"], call["ranks_MS"], *call.tensors("a_SRK"), call.output())
    return [NativeCommand("lora_shrink", operands, _part_numbers(call, "modules"))]


def _lora_linear(call: _Call) -> list[NativeCommand]:
    (plain,) = _linear(call)
    return [_with_adapters(call, plain)]


def _lora_gated_linear(call: _Call) -> list[NativeCommand]:
    (plain,) = _gated_linear(call)
    return [_with_adapters(call, plain)]


def _with_adapters(call: _Call, plain: NativeCommand) -> NativeCommand:
    """A linear whose adapters come before its output."""
    given = (call["shrunk_NR"], call["slots_N"], call["ranks_MS"], *call.tensors("b_SGR16"))
    operands = (*plain.operands[:-1], *given, *plain.operands[-1:])
    numbers = _part_numbers(call, "modules", "starts", "sizes")
    return replace(plain, op=f"lora_{plain.op}", operands=operands, numbers=numbers)


def _part_numbers(call: _Call, *names: str) -> dict[str, float]:
    """Lists of one number for each part, as ``modules.0`` and so on."""
    lists = {name: call.numbers(name) for name in names}
    numbers = {f"{name}.{i}": v for name, values in lists.items() for i, v in enumerate(values)}
    return {"parts": float(len(lists[names[0]])), **numbers}


def _gated_activation(call: _Call) -> list[NativeCommand]:
    operands = rows_of(call["gate_up_NG"], call.output())
    return [NativeCommand("gated_activation", tuple(operands), text=call.text("activation"))]


def _norm_numbers(call: _Call) -> dict[str, float]:
    return {"epsilon": call.number("epsilon"), "variance_size": call.number("variance_size")}


def _rms_norm(call: _Call) -> list[NativeCommand]:
    x, out = rows_of(call["hidden_NH"], call.output())
    return [NativeCommand("rms_norm", (x, call.optional("weight_H"), out), _norm_numbers(call))]


def _add_rms_norm(call: _Call) -> list[NativeCommand]:
    x, residual, out, total = rows_of(
        call["hidden_NH"], call["residual_NH"], call.output(0), call.output(1)
    )
    operands = (x, residual, call.optional("weight_H"), out, total)
    return [NativeCommand("add_rms_norm", operands, _norm_numbers(call))]


def _layer_norm(call: _Call) -> list[NativeCommand]:
    x, out = rows_of(call["hidden_NH"], call.output())
    operands = (x, call.optional("weight_H"), call.optional("bias_H"), out)
    return [NativeCommand("layer_norm", operands, {"epsilon": call.number("epsilon")})]


def _rotary(call: _Call) -> list[NativeCommand]:
    operands = (call["input_NHD"], call["positions_N"], call["cos_sin_PR"], call.output())
    return [NativeCommand("rotary", operands, {"neox": call.number("neox")})]


def _rotary_write_kv(call: _Call) -> list[NativeCommand]:
    vectors = (call["query_NHD"], call["key_NHD"], call["value_NHD"])
    table = (call["positions_N"], call["cos_sin_PR"])
    operands = (*vectors, *table, call["kv_cache"], call["slots_N"], call.output())
    return [NativeCommand("rotary_write_kv", operands, {"neox": call.number("neox")})]


def _write_kv(call: _Call) -> list[NativeCommand]:
    names = ("key_NHD", "value_NHD", "kv_cache", "slots_N")
    return [NativeCommand("write_kv", tuple(call[name] for name in names))]


def _paged_attention(call: _Call) -> list[NativeCommand]:
    operands = (
        *(call[name] for name in ("query_NHD", "kv_cache", "block_table_BT", "query_pos_N")),
        call.optional("sinks_H"),
        call.optional("alibi_slopes_H"),
        call.output(),
    )
    numbers = {name: call.number(name) for name in ("scale", "window", "soft_cap")}
    return [NativeCommand("paged_attention", operands, numbers)]


def _encoder_attention(call: _Call) -> list[NativeCommand]:
    names = ("query_NHD", "key_NHD", "value_NHD", "row_starts_S")
    operands = (*(call[name] for name in names), call.output())
    return [NativeCommand("encoder_attention", operands, {"scale": call.number("scale")})]


def _embedding(call: _Call) -> list[NativeCommand]:
    return _lookup(call, "weight", call["indices"])


def _index_select(call: _Call) -> list[NativeCommand]:
    if call.value("dim") not in (0, -len(call["self"].shape)):
        raise Unclaimed("it selects along another axis than the first")
    return _lookup(call, "self", call["index"])


def _lookup(call: _Call, table: str, ids: Operand) -> list[NativeCommand]:
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


def _elementwise(call: _Call) -> list[NativeCommand]:
    out = call.output()
    expanded = [operand.expanded(out.shape) for operand in call.tensors("inputs")]
    operands = coalesced(*expanded, out)
    return [NativeCommand("elementwise", tuple(operands), text=call.text("program"))]


def _copy(source: Operand, target: Operand) -> NativeCommand:
    operands = coalesced(source.expanded(target.shape), target)
    if len(operands[0].shape) > MAX_AXES:
        raise Unclaimed("it has too many axes")
    return NativeCommand("copy", tuple(operands))


def _write(call: _Call) -> list[NativeCommand]:
    """``copy_``: the result is the first argument."""
    return [_copy(call["src"], call["self"])]


def _converted(call: _Call) -> list[NativeCommand]:
    """A copy in another dtype, order or place."""
    return [_copy(call["self"], call.output())]


def _reshaped(call: _Call) -> list[NativeCommand]:
    """A copy whose shape is another: the target is seen in the source's shape."""
    source = call["self"]
    target = call.output().viewed(source.shape)
    if target is None:
        raise Unclaimed("its result has gaps")
    return [_copy(source, target)]


def _cat(call: _Call) -> list[NativeCommand]:
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


def _stack(call: _Call) -> list[NativeCommand]:
    out, parts = call.output(), call.tensors("tensors")
    axis = _axis(call, len(out.shape))
    places = [out.part(axis, index, 1) for index in range(len(parts))]
    return [_copy(part.inserted(axis), place) for part, place in zip(parts, places, strict=True)]


def _argmax(call: _Call) -> list[NativeCommand]:
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


def _mask_tokens(call: _Call) -> list[NativeCommand]:
    return [NativeCommand("mask_tokens", (call["bitmask_RW"], call["logits_RV"]))]


def _sample(call: _Call) -> list[NativeCommand]:
    names = ("logits_RV", "temperature_R", "top_k_R", "top_p_R", "seed_R", "position_R")
    operands = (*(call[name] for name in names), call.optional("bitmask_RW"))
    return [NativeCommand("sample", (*operands, call.output(0), call.output(1)))]


def _route(call: _Call) -> list[NativeCommand]:
    operands = (call["logits_NE"], call.output(0), call.output(1))
    return [NativeCommand("route", operands, {"renormalise": call.number("renormalise")})]


def _gated_experts(call: _Call) -> list[NativeCommand]:
    weights = (call.weight("gate_up_EGH"), call.optional("bias_EG"))
    operands = (call["input_NH"], *weights, call["experts_NS"], call.output())
    numbers = {name: call.number(name) for name in ("limit", "offset")}
    return [NativeCommand("gated_experts", operands, numbers, call.text("activation"))]


def _combine_experts(call: _Call) -> list[NativeCommand]:
    weights = (call.weight("down_EHI"), call.optional("bias_EH"))
    routed = (call["experts_NS"], call["weights_NS"])
    operands = (call["gated_NSI"], *weights, *routed, call.output())
    return [NativeCommand("combine_experts", operands)]


def _axis(call: _Call, axes: int) -> int:
    """The argument ``dim``, counted from the front."""
    dim = call.value("dim")
    if not isinstance(dim, int):
        raise Unclaimed("dim is not a number")
    return dim % axes


_TABLE: Mapping[str, Callable[[_Call], list[NativeCommand]]] = {
    "rbln::linear": _linear,
    "rbln::gated_linear": _gated_linear,
    "rbln::lora_shrink": _lora_shrink,
    "rbln::lora_linear": _lora_linear,
    "rbln::lora_gated_linear": _lora_gated_linear,
    "rbln::gated_activation": _gated_activation,
    "rbln::rms_norm": _rms_norm,
    "rbln::fused_add_rms_norm": _add_rms_norm,
    "rbln::layer_norm": _layer_norm,
    "rbln::rotary_embedding": _rotary,
    "rbln::rotary_write_kv": _rotary_write_kv,
    "rbln::write_kv": _write_kv,
    "rbln::paged_attention": _paged_attention,
    "rbln::encoder_attention": _encoder_attention,
    "rbln::elementwise": _elementwise,
    "rbln::mask_tokens": _mask_tokens,
    "rbln::sample": _sample,
    "rbln::route": _route,
    "rbln::gated_experts": _gated_experts,
    "rbln::combine_experts": _combine_experts,
    "aten::embedding": _embedding,
    "aten::index_select": _index_select,
    "aten::argmax": _argmax,
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
