# SPDX-License-Identifier: Apache-2.0
"""Pass: rotary embeddings written out become ``rbln::rotary_embedding``.

::

    rows = index_select(cos_sin, 0, positions); cos, sin = halves of rows, one axis more
    first, second = halves of x (neox), or its even and odd features
    first * cos - second * sin, second * cos + first * sin, joined as they were taken apart

Where only the first features of each head are rotated, the rest joined behind them is left to the
operator too.
"""

from collections.abc import Sequence

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.canonicalise import FLOATS
from rbln_host.compiler.passes.match import Match, Op, Var, match, ref
from rbln_host.compiler.passes.rewrite import Editor, rewrite
from rbln_host.compiler.passes.views import halves, interleaved, joined

_COS = Op("aten::unsqueeze", Var("cos"), Var("axis"))
_SIN = Op("aten::unsqueeze", Var("sin"), Var("axis"))
_FIRST = Op(
    "aten::sub",
    Op("aten::mul", Var("first"), _COS),
    Op("aten::mul", Var("second"), _SIN),
)
_SECOND = Op(
    "aten::add",
    Op("aten::mul", Var("second"), _COS),
    Op("aten::mul", Var("first"), _SIN),
)


_ROOTS = frozenset({"aten::cat", "aten::flatten", "aten::reshape", "aten::view"})
"""With what a rotation ends: neox with ``cat``, otherwise with ``stack`` and two axes made one."""


def fuse_rotary(captured: Captured) -> Captured:
    """Fuse rotary embeddings whose cosines and sines are rows of a weight."""

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        fused = None
        if command.operator != "aten::cat":
            stack = editor.producer(command.args[0])
            if stack is not None and _joins_two(editor, stack, "aten::stack"):
                fused = _rotated(editor, command, stack.args[0], neox=False)
        elif _joins_two(editor, command, "aten::cat"):
            fused = _rotated(editor, command, command.args[0], neox=True)
            fused = fused or _with_rest(editor, command, *command.args[0])
        return None if fused is None else [fused]

    operators = {command.operator for command in captured.graph.commands}
    if operators.isdisjoint({"aten::cat", "aten::stack"}):
        return captured
    return rewrite(captured, rule, roots=_ROOTS)


def _joins_two(editor: Editor, command: Command, operator: str) -> bool:
    """Whether it joins two values along the last axis."""
    output = editor.facts.tensors.get(command.outputs[0] or "")
    if command.operator != operator or output is None or len(command.args[0]) != 2:
        return False
    return command.args[1:] in {(-1,), (output.dim() - 1,)}


def _rotated(
    editor: Editor, command: Command, parts: Sequence[Argument], *, neox: bool
) -> Command | None:
    """The rotation of a whole value, given its two parts before they are joined."""
    found = _match_parts(editor, command, parts)
    if found is None or not command.outputs[0]:
        return None
    first, second = found.found["first"], found.found["second"]
    hidden = halves(editor, first, second) if neox else interleaved(editor, first, second)
    lookup = _lookup(editor, found.found["cos"], found.found["sin"])
    if hidden is None or lookup is None:
        return None
    tensors = editor.facts.tensors
    if tensors[command.outputs[0]].shape != tensors[hidden].shape:
        return None
    args = (Ref(hidden), *lookup, neox)
    return _rotary(command, args) if _fits(editor, *args[:3]) else None


def _match_parts(editor: Editor, command: Command, parts: Sequence[Argument]) -> Match | None:
    first = match(editor, _FIRST, parts[0])
    found = None if first is None else match(editor, _SECOND, parts[1], first)
    if found is None:
        return None
    # Cosines and sines are shared by all heads; what is computed from them is not.
    inner = [c for c in found.commands if c.operator != "aten::unsqueeze"]
    join = editor.producer(command.args[0])
    if join is not None:
        inner.append(join)
    return found if Match({}, tuple(inner)).is_private(editor, command) else None


def _lookup(editor: Editor, cos: Argument, sin: Argument) -> tuple[Argument, Argument] | None:
    """Positions and table, when cosines and sines are the halves of the table's rows."""
    rows = halves(editor, cos, sin)
    command = editor.producer(Ref(rows)) if rows is not None else None
    if command is None or command.operator != "aten::index_select" or command.kwargs:
        return None
    table, axis, positions = command.args
    return (positions, table) if axis == 0 and editor.weight(table) is not None else None


def _fits(editor: Editor, hidden: Argument, positions: Argument, table: Argument) -> bool:
    """Whether the operator takes these values, and they are the same wherever they are read."""
    tensor, places, rows = (editor.tensor(a) for a in (hidden, positions, table))
    if tensor is None or places is None or rows is None or tensor.dim() != 3:
        return False
    dtypes = tensor.dtype in FLOATS and rows.dtype == tensor.dtype
    shapes = rows.shape[1] == tensor.shape[2] and places.shape == tensor.shape[:1]
    return dtypes and shapes and editor.is_stable(hidden, positions, table)


def _with_rest(
    editor: Editor, command: Command, rotated: Argument, rest: Argument
) -> Command | None:
    """The rotation of the first features of a value with the others joined behind it."""
    rotary, name = editor.producer(rotated), ref(rotated)
    if rotary is None or rotary.operator != "rbln::rotary_embedding" or name is None:
        return None
    whole = joined(editor, rotary.args[0], rest) if editor.facts.reads[name] == 1 else None
    return None if whole is None else _rotary(command, (Ref(whole), *rotary.args[1:]))


def _rotary(command: Command, args: tuple[Argument, ...]) -> Command:
    return Command("rbln::rotary_embedding", "default", args, {}, command.outputs)
