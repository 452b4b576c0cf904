# SPDX-License-Identifier: Apache-2.0
"""What passes ask about a program: who reads a value, how it lies in memory, who writes there."""

from collections import Counter
from functools import cache

from torch import Tensor

from rbln_host.compiler.graph import Captured, Command, Graph, references
from rbln_host.compiler.operators import resolve
from rbln_host.compiler.shapes import infer, memory, specs


class Facts:
    """A program as it was before a pass changes it. Raises ArtifactError when it cannot run."""

    def __init__(self, captured: Captured) -> None:
        graph = captured.graph
        self.tensors: dict[str, Tensor] = infer(graph, specs(captured.weights))
        """Every value as a meta tensor."""
        self.readers: dict[str, list[int]] = _readers(graph)
        """Positions of the commands that read a value; ``len(commands)`` for a program output."""
        self.reads = Counter({name: len(places) for name, places in self.readers.items()})
        self._written = self._written_memory(graph)
        given = (*graph.inputs, *graph.weights)
        self._given = frozenset(memory(self.tensors[name]) for name in given)

    def is_stable(self, name: str) -> bool:
        """Whether no command writes to the value's memory: it is the same wherever it is read."""
        return memory(self.tensors[name]) not in self._written

    def is_computed(self, name: str) -> bool:
        """Whether the value's memory is the program's own, not an input's or a weight's."""
        return memory(self.tensors[name]) not in self._given

    def share_memory(self, one: str, other: str) -> bool:
        """Whether two values are views of the same memory."""
        return memory(self.tensors[one]) == memory(self.tensors[other])

    def _written_memory(self, graph: Graph) -> frozenset[int]:
        names = (name for command in graph.commands for name in written(command))
        return frozenset(memory(self.tensors[name]) for name in names)


def written(command: Command) -> list[str]:
    """The inputs that a command writes to."""
    positions, keywords = _written_arguments(command.operator, command.overload)
    arguments = [command.args[p] for p in positions if p < len(command.args)]
    arguments += [command.kwargs[k] for k in keywords if k in command.kwargs]
    return list(references(tuple(arguments)))


@cache
def _written_arguments(operator: str, overload: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an operator writes to."""
    schema = resolve(operator, overload)._schema
    found = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(position for position, _ in found), tuple(name for _, name in found)


def _readers(graph: Graph) -> dict[str, list[int]]:
    readers: dict[str, list[int]] = {name: [] for name in graph.values()}
    for place, command in enumerate(graph.commands):
        for name in command.inputs():
            readers[name].append(place)
    for name in graph.outputs:
        readers[name].append(len(graph.commands))
    return readers
