# SPDX-License-Identifier: Apache-2.0
"""Passes, graph to graph: drop what does nothing, compute equal values once, drop the unread."""

from dataclasses import dataclass, field, replace
from typing import Any

from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.graph import Command, Graph, Ref, substitute
from rbln_host.compiler.operators import is_pure, is_uninitialised

_ALIASES = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh"})


def optimise(graph: Graph) -> Graph:
    """All passes in order."""
    return drop_unread(share_equal(drop_aliases(graph)))


def drop_aliases(graph: Graph) -> Graph:
    """Replace values that are only another name of their input by that input."""
    names: dict[str, str] = {}
    kept = []
    for command in graph.commands:
        renamed = _rename(command, names)
        source = renamed.args[0] if renamed.args else None
        output = renamed.outputs[0] if renamed.outputs else None
        if renamed.operator in _ALIASES and isinstance(source, Ref) and output:
            names[output] = source.name
        else:
            kept.append(renamed)
    return _rebuilt(graph, kept, names)


def share_equal(graph: Graph) -> Graph:
    """Compute commands with equal operator and arguments once.

    Only pure commands are shared, and none whose inputs or outputs share memory with a value that
    some command writes to: such a value differs between two places of the program.
    """
    written = written_values(graph)
    sharing = _Sharing()
    for command in graph.commands:
        renamed = _rename(command, sharing.names)
        touched = (*renamed.inputs(), *filter(None, renamed.outputs))
        if is_pure(renamed.operator, renamed.overload) and written.isdisjoint(touched):
            sharing.add(renamed)
        else:
            sharing.kept.append(renamed)
    return _rebuilt(graph, sharing.kept, sharing.names)


@dataclass
class _Sharing:
    """Commands kept so far, where each computation is among them, and outputs renamed."""

    kept: list[Command] = field(default_factory=list)
    places: dict[Any, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, command: Command) -> None:
        """Keep a pure command, or point its outputs at those of an equal one kept before."""
        place = self.places.setdefault(_identity(command), len(self.kept))
        if place == len(self.kept):
            self.kept.append(command)
            return
        first = self.kept[place]
        pairs = list(zip(first.outputs, command.outputs, strict=True))
        merged = replace(first, outputs=tuple(mine or theirs for mine, theirs in pairs))
        self.kept[place] = merged
        self.names.update({theirs: mine for mine, theirs in pairs if mine and theirs})


def drop_unread(graph: Graph) -> Graph:
    """Remove commands whose outputs nobody reads and that do nothing else."""
    read = set(graph.outputs)
    kept = []
    for command in reversed(graph.commands):
        needed = any(name in read for name in command.outputs if name)
        if needed or not _is_droppable(command):
            read.update(command.inputs())
            kept.append(command)
    weights = {name: weight for name, weight in graph.weights.items() if name in read}
    return replace(graph, commands=tuple(reversed(kept)), weights=weights)


def _is_droppable(command: Command) -> bool:
    return is_pure(command.operator, command.overload) or is_uninitialised(command.operator)


def _identity(command: Command) -> Any:
    """Equal for two commands exactly when they compute the same (1 and 1.0 and True differ)."""
    return (command.operator, command.overload, repr(command.args), repr(command.kwargs))


def _rename(command: Command, names: dict[str, str]) -> Command:
    if not names:
        return command
    return replace(
        command,
        args=substitute(command.args, names),
        kwargs={key: substitute(value, names) for key, value in command.kwargs.items()},
    )


def _rebuilt(graph: Graph, commands: list[Command], names: dict[str, str]) -> Graph:
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return replace(graph, commands=tuple(commands), outputs=outputs)
