# SPDX-License-Identifier: Apache-2.0
"""Pass: commands that compute element by element become ``rbln::elementwise``.

A value that one such command alone reads is computed inside it, up to the operator's limits.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.canonicalise import FLOATS
from rbln_host.compiler.passes.rewrite import Editor, rewrite
from rbln_host.ops.elementwise import MAX_DEPTH, MAX_INPUTS, UNARY, result_dtype

MAX_ITEMS = 64
"""Longest program that a group may become."""

Item = Ref | float | str
"""What a postfix expression is made of: a value, a constant, the name of an operator."""
Expression = tuple[Item, ...]


def elementwise(captured: Captured) -> Captured:
    """Replace sums, products and functions of values of float dtypes, alone and in groups.

    A group reads only values that no command writes to, and its result has the dtype that torch
    gives to its inputs: casts inside a group are left out, those at its edge are not.
    """
    known: dict[str, list[Expression]] = {}
    """Forms of values that could be computed where they are read: the longest, and their own."""

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        items = expression(command)
        name = command.outputs[0] if command.outputs else None
        if items is None or name is None or not _is_float(editor, Ref(name)):
            return None
        output = editor.facts.tensors[name]
        forms = [form for form in _forms(editor, items, output, known) if _fits(editor, form)]
        # As a part of a longer form any dtype will do; for itself it must be the output's.
        own = next((form for form in forms if _dtype(editor, form) == output.dtype), None)
        if editor.facts.reads[name] == 1 and forms:
            known[name] = [forms[0]] if own in {None, forms[0]} else [forms[0], own]
        return None if own is None or len(own) == 1 else [_command(own, name)]

    return rewrite(captured, rule, roots=frozenset(_OPERATORS))


def _forms(
    editor: Editor, items: Expression, output: Tensor, known: dict[str, list[Expression]]
) -> list[Expression]:
    """The expression with its values computed inside it, or read, in every way."""
    choices = []
    for item in items:
        read: Expression = (item,)
        inner = known.get(item.name, []) if isinstance(item, Ref) else []
        same = isinstance(item, Ref) and _shape(editor, item) == output.shape
        choices.append([*inner, read] if same else [read])
    forms = (tuple(item for part in chosen for item in part) for chosen in product(*choices))
    return list(dict.fromkeys(forms))


def _fits(editor: Editor, form: Expression) -> bool:
    """Whether the operator takes it."""
    inputs = _inputs(form)
    if not 0 < len(inputs) <= MAX_INPUTS or len(form) > MAX_ITEMS or depth(form) > MAX_DEPTH:
        return False
    return all(_is_float(editor, ref) for ref in inputs)


def _dtype(editor: Editor, form: Expression) -> torch.dtype:
    """The dtype of its value when it is computed for itself."""
    return result_dtype([editor.facts.tensors[ref.name] for ref in _inputs(form)])


def depth(form: Expression) -> int:
    """Most values on the stack at once."""
    now = most = 0
    for item in form:
        if not isinstance(item, str):
            now += 1
        elif item not in UNARY:
            now -= 1
        most = max(most, now)
    return most


def _command(form: Expression, output: str) -> Command:
    inputs = _inputs(form)
    places = {ref: f"i{place}" for place, ref in enumerate(inputs)}
    tokens = [_token(item, places) for item in form]
    return Command("rbln::elementwise", "default", (inputs, " ".join(tokens)), {}, (output,))


def _token(item: Item, places: dict[Ref, str]) -> str:
    if isinstance(item, Ref):
        return places[item]
    return item if isinstance(item, str) else f"c{float(item)!r}"


def _inputs(form: Expression) -> tuple[Ref, ...]:
    return tuple(dict.fromkeys(item for item in form if isinstance(item, Ref)))


def _is_float(editor: Editor, ref: Ref) -> bool:
    tensor = editor.facts.tensors.get(ref.name)
    return tensor is not None and tensor.dtype in FLOATS and editor.is_stable(ref)


def _shape(editor: Editor, ref: Ref) -> tuple[int, ...] | None:
    tensor = editor.facts.tensors.get(ref.name)
    return None if tensor is None else tuple(tensor.shape)


def expression(command: Command) -> Expression | None:
    """One command as an expression; None when it is none of one element."""
    make = _OPERATORS.get(command.operator)
    items = None if make is None else make(command)
    if items is None or not all(_is_item(item) for item in items):
        return None
    return items


def _is_item(item: object) -> bool:
    return isinstance(item, Ref | float | int | str) and not isinstance(item, bool)


Maker = Callable[[Command], tuple[Argument, ...] | None]


def _function(name: str) -> Maker:
    def make(command: Command) -> tuple[Argument, ...] | None:
        plain = len(command.args) == 1 and not command.kwargs
        return (command.args[0], name) if plain else None

    return make


def _operator(name: str) -> Maker:
    def make(command: Command) -> tuple[Argument, ...] | None:
        plain = len(command.args) == 2 and not command.kwargs
        return (*command.args, name) if plain else None

    return make


def _sum(name: str) -> Maker:
    """``x ± alpha * y``."""

    def make(command: Command) -> tuple[Argument, ...] | None:
        left, right, *rest = command.args
        if command.kwargs.keys() - {"alpha"} or len(rest) > 1:
            return None
        alpha = rest[0] if rest else command.kwargs.get("alpha", 1)
        return (left, right, name) if alpha == 1 else (left, right, alpha, "mul", name)

    return make


def _reversed_difference(command: Command) -> tuple[Argument, ...] | None:
    plain = len(command.args) == 2 and not command.kwargs
    return (command.args[1], command.args[0], "sub") if plain else None


def _reciprocal(command: Command) -> tuple[Argument, ...] | None:
    return (1.0, command.args[0], "div")


def _gelu(command: Command) -> tuple[Argument, ...] | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    name = names.get(command.kwargs.get("approximate", "none"))
    return None if name is None or len(command.args) != 1 else (command.args[0], name)


_POWERS: dict[float, tuple[str, ...]] = {
    2.0: ("square",),
    3.0: ("cube",),
    0.5: ("sqrt",),
    -0.5: ("rsqrt",),
}


def _power(command: Command) -> tuple[Argument, ...] | None:
    base, exponent = command.args
    if isinstance(exponent, Ref) or not isinstance(base, Ref) or exponent not in _POWERS:
        return None
    return (base, *_POWERS[exponent])


def _clamp(command: Command) -> tuple[Argument, ...] | None:
    value, low, high = (*command.args, None, None)[:3]
    low, high = command.kwargs.get("min", low), command.kwargs.get("max", high)
    floor = () if low is None else (low, "maximum")
    ceiling = () if high is None else (high, "minimum")
    return (value, *floor, *ceiling)


def _larger(name: str) -> Maker:
    """``max`` and ``min`` of two values; those over an axis are something else."""

    def make(command: Command) -> tuple[Argument, ...] | None:
        return (*command.args, name) if command.overload == "other" else None

    return make


def _cast(command: Command) -> tuple[Argument, ...] | None:
    plain = command.overload == "dtype" and len(command.args) == 2 and not command.kwargs
    return (command.args[0],) if plain else None


_FUNCTIONS = (
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "relu"),
    *("silu", "square"),
)
_OPERATORS: dict[str, Maker] = {
    **{f"aten::{name}": _function(name) for name in _FUNCTIONS},
    **{f"aten::{name}": _operator(name) for name in ("mul", "div", "maximum", "minimum")},
    "aten::add": _sum("add"),
    "aten::sub": _sum("sub"),
    "aten::rsub": _reversed_difference,
    "aten::reciprocal": _reciprocal,
    "aten::gelu": _gelu,
    "aten::pow": _power,
    "aten::clamp": _clamp,
    "aten::clamp_min": _operator("maximum"),
    "aten::clamp_max": _operator("minimum"),
    "aten::max": _larger("maximum"),
    "aten::min": _larger("minimum"),
    "aten::to": _cast,
}
