# SPDX-License-Identifier: Apache-2.0
"""One sweep over a program in which a rule replaces commands."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rbln_host.compiler.graph import Argument, Captured, Command, Graph, Ref
from rbln_host.compiler.passes.drop_unread import needed
from rbln_host.compiler.passes.facts import Facts
from rbln_host.compiler.passes.rename import rename

Made = dict[Any, Tensor]
"""Weights that passes made, shared by all programs of a model so that each is made once."""

Rule = Callable[["Editor", Command], Sequence[Command] | None]
"""Gives the commands that take a command's place, or None to keep it.

What replaces a command defines the same outputs, with the same shapes and dtypes.
"""


def rewrite(
    captured: Captured,
    rule: Rule,
    *,
    roots: frozenset[str] | None = None,
    made: Made | None = None,
    facts: Facts | None = None,
) -> Captured:
    """The program after ``rule`` saw each command once, in order, and without unread commands.

    ``roots`` names the operators that the rule looks at, where those are few.
    """
    commands = captured.graph.commands
    if roots is not None and roots.isdisjoint({command.operator for command in commands}):
        return captured
    editor = Editor(captured, made, facts)
    for place, command in enumerate(commands):
        editor.place = place
        renamed = rename(command, editor.names) if editor.names else command
        if roots is None or command.operator in roots:
            replacement = rule(editor, renamed)
            editor.emit((renamed,) if replacement is None else replacement)
        else:
            editor.emit((renamed,))
    return editor.captured()


class Editor:
    """The program being built, and the facts of the one it is built from.

    Facts about a value keep holding for shape, dtype and readers, since replacements keep names;
    of memory they are those of the program before.
    """

    def __init__(
        self, captured: Captured, made: Made | None = None, facts: Facts | None = None
    ) -> None:
        self.facts = Facts(captured) if facts is None else facts
        self.place = 0
        """Position of the command that the rule sees."""
        self.names: dict[str, str] = {}
        """Values that became another value."""
        self._graph = captured.graph
        self._commands: list[Command | None] = []
        self._places: dict[str, int] = {}
        self._value_weights = dict(captured.graph.weights)
        self._weights = dict(captured.weights)
        self._made: Made = {} if made is None else made

    def emit(self, commands: Sequence[Command]) -> None:
        """Add commands to the program being built."""
        for command in commands:
            for name in command.outputs:
                if name:
                    self._places[name] = len(self._commands)
            self._commands.append(command)

    def remove(self, name: str) -> None:
        """Take out the command that defines the value."""
        self._commands[self._places.pop(name)] = None

    def alias(self, name: str, source: str) -> None:
        """Let every later command read ``source`` in place of ``name``."""
        kept = self.names.get(source, source)
        self.names[name] = kept
        self.facts.reads[kept] += self.facts.reads[name]

    def producer(self, argument: Argument) -> Command | None:
        """The command that makes a value, as it is now; None for anything else."""
        place = self._places.get(argument.name) if isinstance(argument, Ref) else None
        return None if place is None else self._commands[place]

    def tensor(self, argument: Argument) -> Tensor | None:
        """The value as a meta tensor; None for an argument that is none."""
        return self.facts.tensors.get(argument.name) if isinstance(argument, Ref) else None

    def is_stable(self, *arguments: Argument) -> bool:
        """Whether each value among the arguments is the same wherever it is read."""
        refs = [argument for argument in arguments if isinstance(argument, Ref)]
        return all(
            ref.name not in self.facts.tensors or self.facts.is_stable(ref.name) for ref in refs
        )

    def weight(self, argument: Argument) -> str | None:
        """The name of the weight that the argument is, or None."""
        return self._value_weights.get(argument.name) if isinstance(argument, Ref) else None

    def weight_tensor(self, argument: Argument) -> Tensor | None:
        """The weight that the argument is, or None."""
        name = self.weight(argument)
        return None if name is None else self._weights[name]

    def new_value(self, hint: str) -> str:
        """A name that no value has."""
        taken = (self.facts.tensors, self._places, self._value_weights)
        number, name = 0, hint
        while any(name in names for names in taken):
            number += 1
            name = f"{hint}_{number}"
        return name

    def new_weight(
        self, name: str, parts: Sequence[str], make: Callable[[Sequence[Tensor]], Tensor]
    ) -> Ref:
        """The weight ``name`` made from other weights; the name says how it was made."""
        for value, weight in self._value_weights.items():
            if weight == name:
                return Ref(value)
        tensors = [self._weights[part] for part in parts]
        key = (name, tuple(tensor.data_ptr() for tensor in tensors))
        if key not in self._made:
            self._made[key] = make(tensors)
        value = self.new_value(f"w_{name}")
        self._value_weights[value] = name
        self._weights[name] = self._made[key]
        return Ref(value)

    def captured(self) -> Captured:
        """The program that was built."""
        outputs = tuple(self.names.get(name, name) for name in self._graph.outputs)
        commands, read = needed([c for c in self._commands if c is not None], outputs)
        weights = {value: name for value, name in self._value_weights.items() if value in read}
        graph = Graph(self._graph.name, self._graph.inputs, weights, tuple(commands), outputs)
        return Captured(graph, _only(self._weights, weights))


def _only(tensors: Mapping[str, Tensor], weights: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in weights.values()}
