# SPDX-License-Identifier: Apache-2.0
"""Patterns over the commands that lead to a value.

``mul(x, sigmoid(mul(x, 1.702)))`` is written::

    X = Var("x")
    Op("aten::mul", X, Op("aten::sigmoid", Op("aten::mul", X, Number(1.702))))
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

from rbln_host.compiler.graph import Argument, Command, Ref
from rbln_host.compiler.passes.rewrite import Editor

_COMMUTATIVE = frozenset({"aten::add", "aten::mul"})


@dataclass(frozen=True)
class Var:
    """Any argument; the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Number:
    """A number near this one (programs write constants with few digits)."""

    value: float


@dataclass(frozen=True, init=False)
class Op:
    """A command of this operator, any overload, whose arguments match; sums and products in
    either order. Lists and ``None`` among the arguments are taken literally."""

    operator: str
    args: tuple["Pattern", ...]

    def __init__(self, operator: str, *args: "Pattern") -> None:
        object.__setattr__(self, "operator", operator)
        object.__setattr__(self, "args", args)


@dataclass(frozen=True)
class Either:
    """One of several forms of the same."""

    forms: tuple["Pattern", ...]


Pattern = Var | Number | Op | Either | tuple[object, ...] | bool | None


@dataclass(frozen=True)
class Match:
    """What the variables stand for, and the commands that were matched."""

    found: dict[str, Argument]
    commands: tuple[Command, ...]

    def is_private(self, editor: Editor, root: Command) -> bool:
        """Whether nothing outside the match reads a value inside it, but for the root's."""
        commands = {id(command): command for command in (*self.commands, root)}
        reads = Counter(name for command in commands.values() for name in command.inputs())
        inner = [c for c in commands.values() if c is not root]
        return all(
            editor.facts.reads[name] == reads[name]
            for command in inner
            for name in command.outputs
            if name
        )


NOTHING = Match({}, ())


def match(
    editor: Editor, pattern: Pattern, argument: Argument, so_far: Match = NOTHING
) -> Match | None:
    """The first way in which ``argument`` is as the pattern says, or None."""
    return next(_matches(editor, pattern, argument, so_far), None)


def match_command(
    editor: Editor, pattern: Op | Either, command: Command, so_far: Match = NOTHING
) -> Match | None:
    """The same for a command that is not in the program yet; it is not among the matched."""
    forms = pattern.forms if isinstance(pattern, Either) else (pattern,)
    for form in forms:
        if isinstance(form, Op) and form.operator == command.operator:
            found = next(_match_args(editor, form, command, so_far), None)
            if found is not None:
                return found
    return None


def _matches(
    editor: Editor, pattern: Pattern, argument: Argument, so_far: Match
) -> Iterator[Match]:
    if isinstance(pattern, Var):
        if so_far.found.get(pattern.name, argument) == argument:
            yield Match({**so_far.found, pattern.name: argument}, so_far.commands)
    elif isinstance(pattern, Number):
        if type(argument) in {int, float} and isclose(argument, pattern.value, rel_tol=1e-4):
            yield so_far
    elif isinstance(pattern, Either):
        for form in pattern.forms:
            yield from _matches(editor, form, argument, so_far)
    elif isinstance(pattern, Op):
        command = editor.producer(argument)
        if command is not None and command.operator == pattern.operator:
            deeper = Match(so_far.found, (*so_far.commands, command))
            yield from _match_args(editor, pattern, command, deeper)
    elif argument == pattern and type(argument) is type(pattern):
        yield so_far


def _match_args(editor: Editor, pattern: Op, command: Command, so_far: Match) -> Iterator[Match]:
    args = command.args
    if command.kwargs or len(args) != len(pattern.args):
        return
    yield from _match_all(editor, pattern.args, args, so_far)
    if command.operator in _COMMUTATIVE and len(args) == 2:
        yield from _match_all(editor, pattern.args, args[::-1], so_far)


def _match_all(
    editor: Editor, patterns: tuple[Pattern, ...], args: tuple[Argument, ...], so_far: Match
) -> Iterator[Match]:
    if not patterns:
        yield so_far
        return
    for found in _matches(editor, patterns[0], args[0], so_far):
        yield from _match_all(editor, patterns[1:], args[1:], found)


def ref(argument: Argument) -> str | None:
    """The name of the value that the argument is, or None."""
    return argument.name if isinstance(argument, Ref) else None
