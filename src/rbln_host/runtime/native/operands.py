# SPDX-License-Identifier: Apache-2.0
"""Operands of native commands: where a value lies, and its axes in the form that kernels take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.plan import Kind, Plan, View

MAX_AXES = 5
"""Axes of a kernel's operand."""


@dataclass(frozen=True)
class Base:
    """A region of memory that is bound to an address: the arena, an input, a weight's copy, …"""

    kind: Kind
    name: str = ""
    layout: Layout = Layout.PLAIN
    nbytes: int = 0


@dataclass(frozen=True)
class Operand:
    """A tensor in a base region; ``offset`` in bytes, ``strides`` in elements."""

    base: Base
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise ValueError(f"{len(self.strides)} strides for the shape {self.shape}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        axes = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        return not self.size or all(
            stride == math.prod(n for n, _ in axes[i + 1 :]) for i, (_, stride) in enumerate(axes)
        )

    def viewed(self, shape: Sequence[int]) -> "Operand | None":
        """A contiguous operand of another shape with as many elements; None if it is not one."""
        if not self.is_contiguous or math.prod(shape) != self.size:
            return None
        return replace(self, shape=tuple(shape), strides=contiguous_strides(shape))

    def expanded(self, shape: Sequence[int]) -> "Operand":
        """Broadcast to ``shape``: the axes that grow get stride 0. ValueError if it cannot be."""
        missing = len(shape) - len(self.shape)
        sizes = (1,) * missing + self.shape
        strides = (0,) * missing + self.strides
        pairs = list(zip(sizes, shape, strict=True)) if missing >= 0 else [(0, 1)]
        if any(have not in (1, want) for have, want in pairs):
            raise ValueError(f"{self.shape} cannot be expanded to {tuple(shape)}")
        return replace(
            self,
            shape=tuple(shape),
            strides=tuple(
                0 if have != want else stride
                for (have, want), stride in zip(pairs, strides, strict=True)
            ),
        )

    def part(self, axis: int, start: int, size: int) -> "Operand":
        """The elements ``start`` to ``start + size`` along an axis."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        moved = start * self.strides[axis] * self.dtype.itemsize
        return replace(self, shape=shape, offset=self.offset + moved)

    def inserted(self, axis: int) -> "Operand":
        """With a new axis of size 1."""
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(axis, 1)
        strides.insert(axis, 0)
        return replace(self, shape=tuple(shape), strides=tuple(strides))


def operand_of(plan: Plan, value: str) -> Operand:
    """Where a value of the program lies."""
    view = plan.views[value]
    return Operand(*_place(plan, view), view.dtype, view.shape, view.strides)


def arena_of(plan: Plan) -> Base:
    """The region of all that is alive for a while only."""
    return Base(Kind.ARENA, nbytes=plan.arena_bytes)


def weight_operand(name: str, spec: TensorSpec, layout: Layout) -> Operand:
    """A whole weight in one of its layouts."""
    shape = layout.shape(spec)
    nbytes = math.prod(shape) * spec.dtype.itemsize
    base = Base(Kind.WEIGHT, name, layout, nbytes)
    return Operand(base, 0, spec.dtype, shape, contiguous_strides(shape))


def rows_of(*operands: Operand) -> list[Operand]:
    """The operands with all axes but the last as one, if that can be done to each; else as given.

    A single axis becomes one row.
    """
    merged = [_merged(operand) for operand in operands]
    return [m for m in merged if m] if all(merged) else list(operands)


def coalesced(*operands: Operand) -> list[Operand]:
    """Operands of one shape with as few axes as describe them all: those of size 1 are dropped and
    neighbours joined. At least one axis is left."""
    shape = operands[0].shape
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    groups: list[list[int]] = []
    for axis in kept:
        if groups and all(_follow(o, groups[-1][-1], axis) for o in operands):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = tuple(math.prod(shape[axis] for axis in group) for group in groups) or (1,)
    return [
        replace(o, shape=sizes, strides=tuple(o.strides[g[-1]] for g in groups) or (1,))
        for o in operands
    ]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _follow(operand: Operand, outer: int, inner: int) -> bool:
    """Whether two axes can be read as one."""
    return operand.strides[outer] == operand.strides[inner] * operand.shape[inner]


def _merged(operand: Operand) -> Operand | None:
    """``[..., K]`` as ``[N, K]``."""
    if not operand.shape:
        return None
    *outer, width = operand.shape
    *strides, last = operand.strides
    if not operand.size:
        return replace(operand, shape=(math.prod(outer), width), strides=(width, 1))
    leading = replace(operand, shape=tuple(outer), strides=tuple(strides))
    (rows,) = coalesced(leading)
    if len(rows.shape) != 1:
        return None
    stride = rows.strides[0] if rows.shape[0] > 1 else width
    return replace(operand, shape=(rows.shape[0], width), strides=(stride, last))


def _place(plan: Plan, view: View) -> tuple[Base, int]:
    storage = plan.storages[view.storage]
    if storage.kind is Kind.ARENA:
        return arena_of(plan), storage.offset + view.byte_offset
    return Base(storage.kind, storage.name, nbytes=storage.nbytes), view.byte_offset
