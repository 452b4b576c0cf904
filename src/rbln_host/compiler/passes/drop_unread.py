# SPDX-License-Identifier: Apache-2.0
"""Pass: commands whose outputs nobody reads, and that do nothing else, are removed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.operators import is_pure, is_uninitialised


def drop_unread(graph: Graph) -> Graph:
    """Remove commands whose outputs nobody reads and that do nothing else."""
    kept, read = needed(graph.commands, graph.outputs)
    weights = {name: weight for name, weight in graph.weights.items() if name in read}
    return replace(graph, commands=tuple(kept), weights=weights)


def needed(
    commands: Sequence[Command], outputs: Iterable[str]
) -> tuple[list[Command], frozenset[str]]:
    """The commands that must stay, in order, and the values that are read."""
    read = set(outputs)
    kept = []
    for command in reversed(commands):
        if any(name in read for name in command.outputs if name) or not _is_droppable(command):
            read.update(command.inputs())
            kept.append(command)
    return kept[::-1], frozenset(read)


def _is_droppable(command: Command) -> bool:
    return is_pure(command.operator, command.overload) or is_uninitialised(command.operator)
