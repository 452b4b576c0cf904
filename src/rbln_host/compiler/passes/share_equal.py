# SPDX-License-Identifier: Apache-2.0
"""Pass: equal values are computed once."""

from dataclasses import dataclass, field, replace
from typing import Any

from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.operators import is_pure
from rbln_host.compiler.passes.rename import rebuilt, rename


def share_equal(graph: Graph) -> Graph:
    """Compute commands with equal operator and arguments once.

    Only pure commands are shared, and none whose inputs or outputs share memory with a value that
    some command writes to: such a value differs between two places of the program.
    """
    written = written_values(graph)
    sharing = _Sharing()
    for command in graph.commands:
        renamed = rename(command, sharing.names)
        touched = (*renamed.inputs(), *filter(None, renamed.outputs))
        if is_pure(renamed.operator, renamed.overload) and written.isdisjoint(touched):
            sharing.add(renamed)
        else:
            sharing.kept.append(renamed)
    return rebuilt(graph, sharing.kept, sharing.names)


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


def _identity(command: Command) -> Any:
    """Equal for two commands exactly when they compute the same (1 and 1.0 and True differ)."""
    return (command.operator, command.overload, repr(command.args), repr(command.kwargs))
