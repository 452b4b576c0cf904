# SPDX-License-Identifier: Apache-2.0
"""Pass: Hugging Face's rotary embedding becomes ``rbln::rotary_embedding``.

It multiplies ``[1, heads, N, R]`` by cosines and sines, each angle twice:
``x * cos + cat((-second half of x, first half of x)) * sin``. Where they are rows of a weight, that
is the operator's table. Where the step has computed them, one angle of each makes a table of N
rows, in which token i is at position i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.canonicalise import FLOATS
from rbln_host.compiler.passes.match import Match, Op, Var, match_command, ref
from rbln_host.compiler.passes.rewrite import Editor, Made, rewrite
from rbln_host.compiler.passes.views import halves, joined

_X, _COS, _SIN = Var("x"), Var("cos"), Var("sin")
_ROTATED = Op(
    "aten::add",
    Op("aten::mul", Op("aten::cat", Var("turned"), Var("axis")), _SIN),
    Op("aten::mul", _X, _COS),
)
_POINTWISE = frozenset({"aten::cos", "aten::sin", "aten::to", "aten::mul", "aten::unsqueeze"})


def fuse_rotate_half(captured: Captured, made: Made | None = None) -> Captured:
    """Fuse rotations of values ``[1, heads, N, R]``, and those with more features behind them."""
    if not any(command.operator == "aten::neg" for command in captured.graph.commands):
        return captured
    state = _State()

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        if command.operator == "aten::add":
            return _rotate(editor, command, state)
        return _rotate_with_rest(editor, command, state)

    return rewrite(captured, rule, roots=frozenset({"aten::add", "aten::cat"}), made=made)


@dataclass
class _State:
    """What was found so far."""

    rows: dict[tuple[str, str], "_Rows"] = field(default_factory=dict)
    """Cosines and sines -> where they stand."""
    rotated: dict[str, tuple[str, "_Rows"]] = field(default_factory=dict)
    """Rotated values -> what was rotated, and by which rows."""


@dataclass(frozen=True)
class _Rows:
    """The row of each token in a table of cosines and sines."""

    positions: Ref
    table: Ref


def _rotate(editor: Editor, command: Command, state: _State) -> list[Command] | None:
    found = match_command(editor, _ROTATED, command)
    output = command.outputs[0]
    if found is None or output is None or not found.is_private(editor, command):
        return None
    hidden, cos, sin = (ref(found.found[key]) for key in ("x", "cos", "sin"))
    if hidden is None or cos is None or sin is None or not _turns(editor, found):
        return None
    if not _fits(editor, hidden, cos, sin):
        return None
    rows, made = _rows(editor, cos, sin, state)
    state.rotated[output] = (hidden, rows)
    return [*made, *_rotary(editor, hidden, rows, output)]


def _rotate_with_rest(editor: Editor, command: Command, state: _State) -> list[Command] | None:
    output = command.outputs[0]
    if len(command.args[0]) != 2 or output is None:
        return None
    rotated, rest = command.args[0]
    known = state.rotated.get(ref(rotated) or "")
    if known is None or editor.facts.reads[rotated.name] != 1 or command.args[1] not in {-1, 3}:
        return None
    hidden, rows = known
    whole = joined(editor, Ref(hidden), rest)
    return None if whole is None else _rotary(editor, whole, rows, output)


def _turns(editor: Editor, found: Match) -> bool:
    """Whether the second factor is ``x`` with its halves changed and the new first one negated."""
    pieces, axis = found.found["turned"], found.found["axis"]
    if len(pieces) != 2 or axis not in {-1, 3}:
        return False
    negated = editor.producer(pieces[0])
    if negated is None or negated.operator != "aten::neg":
        return False
    return halves(editor, pieces[1], negated.args[0]) == ref(found.found["x"])


def _fits(editor: Editor, hidden: str, cos: str, sin: str) -> bool:
    tensors = [editor.facts.tensors.get(name) for name in (hidden, cos, sin)]
    if any(tensor is None or tensor.dim() != 4 for tensor in tensors):
        return False
    tensor, cosines, sines = (t for t in tensors if t is not None)
    batch, _, rows, size = tensor.shape
    shape = (1, 1, rows, size)
    if batch != 1 or cosines.shape != shape or sines.shape != shape or tensor.dtype not in FLOATS:
        return False
    if not tensor.dtype == cosines.dtype == sines.dtype:
        return False
    twice = all(_is_each_twice(editor, Ref(name), size) for name in (cos, sin))
    return twice and editor.is_stable(Ref(hidden), Ref(cos), Ref(sin))


def _is_each_twice(editor: Editor, argument: Argument, size: int) -> bool:
    """Whether the two halves of the last axis, of this size, are the same."""
    while (command := editor.producer(argument)) is not None:
        tensor = editor.tensor(argument)
        if tensor is None or not tensor.dim() or tensor.shape[-1] != size:
            return False
        if command.operator == "aten::cat":
            pieces = command.args[0]
            last = command.args[1:] in {(-1,), (tensor.dim() - 1,)}
            return last and len(pieces) == 2 and pieces[0] == pieces[1]
        factors = command.args[1:] if command.operator == "aten::mul" else ()
        if command.operator not in _POINTWISE or any(isinstance(f, Ref) for f in factors):
            return False
        argument = command.args[0]
    return False


def _rows(editor: Editor, cos: str, sin: str, state: _State) -> tuple[_Rows, list[Command]]:
    """Where cosines and sines stand, and the commands that make their table if it is new."""
    made: list[Command] = []
    known = state.rows.get((cos, sin)) or _looked_up(editor, cos, sin)
    if known is None:
        table, made = _table(editor, cos, sin)
        count = editor.facts.tensors[cos].shape[2]
        positions = editor.new_weight(f"arange.{count}", (), lambda _: torch.arange(count))
        known = _Rows(positions, table)
    state.rows[cos, sin] = known
    return known, made


def _looked_up(editor: Editor, cos: str, sin: str) -> _Rows | None:
    """The rows of a weight, when they are the halves of what was looked up in it."""
    halved = [_single_angles(editor, Ref(name)) for name in (cos, sin)]
    rows = halves(editor, *halved)
    command = editor.producer(Ref(rows)) if rows is not None else None
    if command is None or command.operator != "aten::index_select" or command.kwargs:
        return None
    table, axis, positions = command.args
    tensor, places = editor.weight_tensor(table), editor.tensor(positions)
    if axis != 0 or tensor is None or places is None or not editor.is_stable(positions):
        return None
    _, _, count, size = editor.facts.tensors[cos].shape
    fits = tensor.dim() == 2 and tensor.shape[1] == size and tuple(places.shape) == (count,)
    fits = fits and tensor.dtype == editor.facts.tensors[cos].dtype
    return _Rows(positions, table) if fits else None


def _single_angles(editor: Editor, argument: Argument) -> Argument:
    """What was joined with itself and only then given more axes; None for anything else."""
    command = editor.producer(argument)
    while command is not None and command.operator == "aten::unsqueeze":
        if command.args[1] < 0:
            return None
        command = editor.producer(command.args[0])
    return None if command is None or command.operator != "aten::cat" else command.args[0][0]


def _table(editor: Editor, cos: str, sin: str) -> tuple[Ref, list[Command]]:
    """A table ``[N, R]`` of one angle each, and the commands that make it."""
    _, _, rows, size = editor.facts.tensors[cos].shape
    names = [editor.new_value(f"{source}_half") for source in (cos, sin)]
    halved = [
        Command("aten::slice", "Tensor", (Ref(source), 3, 0, size // 2), {}, (name,))
        for source, name in zip((cos, sin), names, strict=True)
    ]
    both, table = editor.new_value(f"{cos}_{sin}"), editor.new_value(f"{cos}_{sin}_table")
    pieces = tuple(Ref(name) for name in names)
    joining = Command("aten::cat", "default", (pieces, -1), {}, (both,))
    shaping = Command("aten::view", "default", (Ref(both), (rows, size)), {}, (table,))
    return Ref(table), [*halved, joining, shaping]


def _rotary(editor: Editor, hidden: str, rows: _Rows, output: str) -> list[Command]:
    """``output`` ``[1, heads, N, D]`` as the rotation of ``[N, heads, D]`` and back."""
    steps = [editor.new_value(f"{output}_{step}") for step in ("turned", "flat", "rotary", "up")]
    turned, flat, rotary, up = steps
    args = (Ref(flat), rows.positions, rows.table, True)
    return [
        Command("aten::transpose", "int", (Ref(hidden), 1, 2), {}, (turned,)),
        Command("aten::select", "int", (Ref(turned), 0, 0), {}, (flat,)),
        Command("rbln::rotary_embedding", "default", args, {}, (rotary,)),
        Command("aten::unsqueeze", "default", (Ref(rotary), 0), {}, (up,)),
        Command("aten::transpose", "int", (Ref(up), 1, 2), {}, (output,)),
    ]
