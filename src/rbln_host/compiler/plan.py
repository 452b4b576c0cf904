# SPDX-License-Identifier: Apache-2.0
"""The memory plan of a program: where every value lies, and which commands have work to do.

Values that are views of each other share one *storage*. What is alive only for a while lies in the
*arena*, one block of memory in which storages that are never alive together may overlap. A plan is
derived from a checked program when it is loaded and is never stored, so no file has offsets to
forge.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby, pairwise

import torch
from torch import Tensor

from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.operators import is_pure, is_uninitialised

ALIGNMENT = 64
"""Bytes. Every storage starts at a cache line."""
CONSTANT_BYTES = 4 << 20
"""Largest value that is computed once and kept, rather than on every run."""


class Kind(StrEnum):
    """Whose memory a storage is."""

    INPUT = "input"
    WEIGHT = "weight"
    ARENA = "arena"
    OUTPUT = "output"
    """The program's own: what it returns must outlive the runs of programs that share the arena."""
    CONSTANT = "constant"
    """The program's own: computed once from weights alone."""


class Work(StrEnum):
    """What a command costs."""

    NONE = "none"
    """Its results are views of its inputs, or uninitialised memory."""
    ONCE = "once"
    """Its results are the same in every run."""
    EVERY_RUN = "every_run"

    @property
    def costs(self) -> bool:
        """Whether there is something to compute, ever."""
        return self is not Work.NONE


@dataclass(frozen=True)
class Storage:
    """Memory that one value or several views lie in. ``offset`` is the place in the arena.

    It holds data from command ``first`` to command ``last``, both included.
    """

    kind: Kind
    name: str
    """The input's, the weight's, or that of the value it was made for."""
    nbytes: int
    first: int
    last: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.first > self.last:
            lifetime = f"{self.first} to {self.last}"
            raise ValueError(f"storage {self.name}: {self.nbytes} bytes from {lifetime}")
        if self.offset < 0 or self.offset % ALIGNMENT:
            raise ValueError(f"storage {self.name}: offset {self.offset} is not aligned")

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.nbytes

    def meets(self, other: "Storage") -> bool:
        """Whether both are alive at some command."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class View:
    """A value: a storage (by index) and how its elements lie there, in elements."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Storages, the values in them, and the work of each command.

    Raises ValueError when two storages of the arena that are alive together overlap, or one does
    not fit into it.
    """

    storages: tuple[Storage, ...] = field(repr=False)
    views: Mapping[str, View] = field(repr=False)
    work: tuple[Work, ...] = field(repr=False)
    arena_bytes: int

    def __post_init__(self) -> None:
        in_arena = self.of_kind(Kind.ARENA)
        for storage in in_arena:
            if storage.end > self.arena_bytes:
                raise ValueError(f"storage {storage.name} does not fit into the arena")
        for one, other in _alive_neighbours(in_arena):
            if one.end > other.offset:
                raise ValueError(f"storages {one.name} and {other.name} overlap")

    def of_kind(self, kind: Kind) -> list[Storage]:
        return [storage for storage in self.storages if storage.kind is kind]

    def storage(self, value: str) -> Storage:
        """The storage that a value lies in."""
        return self.storages[self.views[value].storage]


def plan_memory(graph: Graph, tensors: Mapping[str, Tensor]) -> Plan:
    """Plan a program, given every value as a meta tensor (:func:`rbln_host.compiler.shapes.infer`).

    Storages are placed largest first, each into the smallest gap that the ones alive with it
    leave.
    """
    planner = _Planner(graph, tensors)
    storages = planner.storages()
    placed = place([storage for storage in storages if storage.kind is Kind.ARENA])
    by_name = {storage.name: storage for storage in placed}
    return Plan(
        storages=tuple(s if s.kind is not Kind.ARENA else by_name[s.name] for s in storages),
        views=planner.views(),
        work=planner.work,
        arena_bytes=_aligned(max((storage.end for storage in placed), default=0)),
    )


class _Planner:
    """Finds the storages of one program, their kinds and lifetimes, and the commands' work."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        self._graph, self._tensors = graph, tensors
        numbers: dict[int, int] = {}
        self._numbers = {
            name: numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers))
            for name, tensor in tensors.items()
        }
        """Value -> number of its storage, counted in the order of the values."""
        self._written = written_values(graph)
        self._kinds: dict[int, Kind] = {}
        self._constant: set[int] = set()
        for names, kind in (
            (graph.outputs, Kind.OUTPUT),
            (graph.weights, Kind.WEIGHT),
            (graph.inputs, Kind.INPUT),
        ):
            self._kinds.update((self._numbers[name], kind) for name in names)
        self.work = tuple(self._work(command) for command in graph.commands)

    def views(self) -> dict[str, View]:
        return {
            name: View(
                self._numbers[name],
                tensor.dtype,
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
            )
            for name, tensor in self._tensors.items()
        }

    def storages(self) -> list[Storage]:
        uses = self._uses()
        found: dict[int, Storage] = {}
        for name, number in self._numbers.items():
            if number not in found:
                kind = self._kinds.get(number, Kind.ARENA)
                label = self._graph.weights[name] if kind is Kind.WEIGHT else name
                nbytes = self._tensors[name].untyped_storage().nbytes()
                first, last = uses.get(number, (0, 0))
                found[number] = Storage(kind, label, nbytes, first, last)
        return list(found.values())

    def _uses(self) -> dict[int, tuple[int, int]]:
        """Storage -> first and last command that touches it."""
        uses: dict[int, tuple[int, int]] = {}
        for index, command in enumerate(self._graph.commands):
            for name in _touched(command):
                number = self._numbers[name]
                first, _ = uses.get(number, (index, index))
                uses[number] = (first, index)
        return uses

    def _work(self, command: Command) -> Work:
        outputs = [name for name in command.outputs if name]
        pure = is_pure(command.operator, command.overload)
        inputs = {self._numbers[name] for name in command.inputs()}
        made = {self._numbers[name] for name in outputs}
        if outputs and (is_uninitialised(command.operator) or (pure and made <= inputs)):
            return Work.NONE
        if not (pure and outputs and self._is_constant(outputs, inputs)):
            return Work.EVERY_RUN
        self._kinds.update(dict.fromkeys(made - inputs, Kind.CONSTANT))
        return Work.ONCE

    def _is_constant(self, outputs: Sequence[str], inputs: Iterable[int]) -> bool:
        """Whether the results depend on weights alone, nobody writes to them, they are small."""
        kinds = {self._kinds.get(number, Kind.ARENA) for number in inputs}
        sizes = [self._tensors[name].untyped_storage().nbytes() for name in outputs]
        free = all(self._numbers[name] not in self._kinds for name in outputs)
        return (
            free
            and kinds <= {Kind.WEIGHT, Kind.CONSTANT}
            and self._written.isdisjoint(outputs)
            and max(sizes) <= CONSTANT_BYTES
        )


def _touched(command: Command) -> Iterator[str]:
    yield from command.inputs()
    yield from filter(None, command.outputs)


def place(storages: Sequence[Storage]) -> list[Storage]:
    """Give every storage an offset: largest first, into the tightest gap."""
    placed: list[Storage] = []
    for storage in sorted(storages, key=lambda s: (-s.nbytes, s.first, s.name)):
        around = sorted((s for s in placed if s.meets(storage)), key=lambda s: s.offset)
        placed.append(replace(storage, offset=_tightest(around, storage.nbytes)))
    return placed


def _tightest(around: Sequence[Storage], nbytes: int) -> int:
    """Where ``nbytes`` fit best between storages sorted by offset; behind them if nowhere."""
    best_size, best, end = -1, -1, 0
    for storage in around:
        gap = storage.offset - end
        if gap >= nbytes and (best < 0 or gap < best_size):
            best_size, best = gap, end
        end = max(end, _aligned(storage.end))
    return best if best >= 0 else end


def _alive_neighbours(storages: Iterable[Storage]) -> Iterator[tuple[Storage, Storage]]:
    """At each moment that one begins: pairs of live storages next to each other in the arena.

    Storages that begin later find those before them in place, so all overlaps are among the pairs.
    """
    alive: list[Storage] = []
    filled = sorted((s for s in storages if s.nbytes), key=lambda s: s.first)
    for index, begun in groupby(filled, key=lambda s: s.first):
        alive = sorted((s for s in (*alive, *begun) if s.last >= index), key=lambda s: s.offset)
        yield from pairwise(alive)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
