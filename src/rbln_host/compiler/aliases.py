# SPDX-License-Identifier: Apache-2.0
"""Which values of a program share memory, and which of them some command writes to."""

from collections.abc import Iterator
from typing import Any

from rbln_host.compiler.graph import Argument, Command, Graph, references
from rbln_host.compiler.operators import may_alias, resolve


class _Groups:
    """Disjoint sets of value names (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def find(self, name: str) -> str:
        """The representative of the set that ``name`` is in."""
        root = name
        while (parent := self._parents.get(root)) is not None:
            root = parent
        while name != root:
            self._parents[name], name = root, self._parents[name]
        return root

    def join(self, one: str, other: str) -> None:
        """Make the two sets one."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parents[other] = one


def written_values(graph: Graph, *, surely: bool = False) -> frozenset[str]:
    """Values some command writes to, with every value that may share their memory.

    ``surely`` counts only the sharing that operators' schemas declare.
    """
    groups = _Groups()
    targets: set[str] = set()
    for command in graph.commands:
        sources = set(_alias_sources(command, surely))
        for output in filter(None, command.outputs):
            for source in sources:
                groups.join(source, output)
        targets.update(_written(command))
    roots = {groups.find(name) for name in targets}
    return frozenset(name for name in graph.values() if groups.find(name) in roots)


def _alias_sources(command: Command, surely: bool) -> Iterator[str]:
    """Inputs whose memory an output of the command may share."""
    if not may_alias(command.operator, command.overload):
        return
    pairs = list(_arguments(command))
    declared = [value for argument, value in pairs if argument.alias_info is not None]
    for value in declared if declared or surely else [value for _, value in pairs]:
        yield from references(value)


def _written(command: Command) -> Iterator[str]:
    """Inputs the command writes to."""
    for argument, value in _arguments(command):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from references(value)


def _arguments(command: Command) -> Iterator[tuple[Any, Argument]]:
    """Each argument's schema with the value given for it, by position or by name."""
    schema = resolve(command.operator, command.overload)._schema
    yield from zip(schema.arguments, command.args, strict=False)
    for argument in schema.arguments:
        if argument.name in command.kwargs:
            yield argument, command.kwargs[argument.name]
