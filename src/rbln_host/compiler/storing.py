# SPDX-License-Identifier: Apache-2.0
"""Which weights are stored, and in which layout: each content once for each layout it needs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from rbln_host.compiler.capture import Captured, memory_of
from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.manifest import WeightEntry
from rbln_host.compiler.pack import Layout, layout_of
from rbln_host.compiler.weight_files import Pending
from rbln_host.compiler.weights import content_digest, in_layout, packed_names, spec_of


@dataclass(frozen=True)
class WeightPlan:
    """What is to be written, and the entries of the names that it serves."""

    entries: Mapping[str, WeightEntry]
    pending: tuple[Pending, ...]


@dataclass
class _Content:
    """One content: a tensor that has it, whether some kernel reads it packed, what is stored."""

    digest: str
    tensor: Tensor
    packed: bool = False
    stored: tuple[Layout, ...] = field(default=())

    @property
    def missing(self) -> tuple[Layout, ...]:
        """The layout to add, if any. A packed copy serves every reader, a plain one only some."""
        wanted = layout_of(spec_of(self.tensor), self.packed)
        served = wanted in self.stored or Layout.ROWS16 in self.stored
        return () if served else (wanted,)

    def entry(self) -> WeightEntry:
        layouts = (*self.stored, *self.missing)
        return WeightEntry.of(self.digest, spec_of(self.tensor), *layouts)

    def pending(self) -> Iterator[Pending]:
        for layout in self.missing:
            spec = spec_of(self.tensor)
            memory = TensorSpec(layout.shape(spec), spec.dtype)
            make = partial(in_layout, self.tensor, layout)
            yield Pending(self.entry().key(layout), memory, make)


def plan_weights(captured: Iterable[Captured], stored: Mapping[str, WeightEntry]) -> WeightPlan:
    """Decide how the weights of ``captured`` join those that are stored.

    ValueError when a name stands for two different weights.
    """
    items = list(captured)
    digests = _digests(items, stored)
    packed = packed_names(items)
    contents: dict[str, _Content] = {}
    for name, tensor in _weights(items):
        content = contents.setdefault(digests[name], _Content(digests[name], tensor))
        content.packed |= name in packed
    for entry in stored.values():
        if entry.content in contents:
            content = contents[entry.content]
            content.stored = tuple(sorted({*content.stored, *entry.layouts}))
    return WeightPlan(
        entries={name: contents[digest].entry() for name, digest in digests.items()},
        pending=tuple(item for content in contents.values() for item in content.pending()),
    )


def _digests(items: Iterable[Captured], stored: Mapping[str, WeightEntry]) -> dict[str, str]:
    """Name -> digest of its content. Of stored names the artifact's key vouches for the content."""
    digests: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in _weights(items):
        entry = stored.get(name)
        if entry is None:
            memory = memory_of(tensor)
            found = seen[memory] if memory in seen else content_digest(tensor)
            seen[memory] = found
        else:
            found = entry.content if entry.spec == spec_of(tensor) else ""
        if not found or digests.setdefault(name, found) != found:
            raise ValueError(f"two different weights are called {name!r}")
    return digests


def _weights(items: Iterable[Captured]) -> Iterator[tuple[str, Tensor]]:
    for item in items:
        yield from item.weights.items()
