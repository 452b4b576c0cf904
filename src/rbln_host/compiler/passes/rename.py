# SPDX-License-Identifier: Apache-2.0
"""What every pass needs to build a graph again: renamed commands and outputs."""

from collections.abc import Iterable
from dataclasses import replace

from rbln_host.compiler.graph import Command, Graph, substitute


def rename(command: Command, names: dict[str, str]) -> Command:
    """The command with every value it reads renamed through ``names``."""
    if not any(name in names for name in command.inputs()):
        return command
    return replace(
        command,
        args=substitute(command.args, names),
        kwargs={key: substitute(value, names) for key, value in command.kwargs.items()},
    )


def rebuilt(graph: Graph, commands: Iterable[Command], names: dict[str, str]) -> Graph:
    """The graph with other commands, and its outputs renamed."""
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return replace(graph, commands=tuple(commands), outputs=outputs)
