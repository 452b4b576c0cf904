# SPDX-License-Identifier: Apache-2.0
"""Which values of a program share memory, and which of them some command writes to."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

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
    schema = _schema(command.operator, command.overload)
    declared = [a for a in schema if a.is_aliased and _given(command, a) is not None]
    for argument in declared if declared or surely else schema:
        yield from references(_given(command, argument))


def _written(command: Command) -> Iterator[str]:
    """Inputs the command writes to."""
    for argument in _schema(command.operator, command.overload):
        if argument.is_written:
            yield from references(_given(command, argument))


class _Argument(NamedTuple):
    """What an operator's schema says of one argument."""

    place: int
    name: str
    is_aliased: bool
    is_written: bool


@cache
def _schema(operator: str, overload: str) -> tuple[_Argument, ...]:
    arguments = resolve(operator, overload)._schema.arguments
    return tuple(
        _Argument(
            place,
            argument.name,
            argument.alias_info is not None,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for place, argument in enumerate(arguments)
    )


def _given(command: Command, argument: _Argument) -> Argument:
    """What the command gives for the argument, by position or by name; None for nothing."""
    if argument.place < len(command.args):
        return command.args[argument.place]
    return command.kwargs.get(argument.name)
