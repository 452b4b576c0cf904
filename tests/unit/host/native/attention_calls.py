# SPDX-License-Identifier: Apache-2.0
"""Calls of paged attention whose memory is poisoned wherever a kernel has no business."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import paged_attention
from tests.unit.host.native.programs import Op, blank, random, single, spread

STRAY = (-1, 1 << 20, (1 << 31) - 1)
"""Blocks that do not exist: named where no key is visible."""
EDGES = (0, 1, 2, 15, 16, 17, 30, 31, 32, 127, 128, 129, 254, 255, 256, 257, 300, 520)
"""Positions around blocks of 16, 31 and 128, tiles of 128 keys and parts of 256."""
WINDOWS = (0, 0, 1, 2, 15, 16, 17, 50, 127, 128, 129, 300)


@dataclass(frozen=True)
class Heads:
    """Sizes of a call's attention."""

    kv_heads: int
    group: int
    head_size: int
    block_size: int


@dataclass(frozen=True)
class Rules:
    """What changes the scores; ``sinks`` and ``slopes`` hold one number per head."""

    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Operands: query ``[B * Q, H, D]``, pool, table ``[B, T]``, positions ``[B * Q]``."""

    query: Tensor
    kv: Tensor
    table: Tensor
    positions: Tensor
    rules: Rules

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])

    def op(self, out: Tensor) -> Op:
        rules = self.rules
        tensors = [self.query, self.kv, self.table, self.positions, rules.sinks, rules.slopes, out]
        numbers = {"scale": self.scale, "window": rules.window, "soft_cap": rules.soft_cap}
        return Op("paged_attention", tensors, numbers)

    def output(self) -> Tensor:
        return blank(self.query.shape, self.query.dtype)

    def exact(self) -> Tensor:
        """The eager reference in fp32."""
        return paged_attention(
            self.query.float(),
            self.kv.float(),
            self.table,
            self.positions,
            self.scale,
            self.rules.window,
            self.rules.soft_cap,
            single(self.rules.sinks),
            self.rules.slopes,
        )

    def part(self, first: int, end: int) -> "AttentionCall":
        """The sequences ``first`` to ``end`` alone."""
        queries = len(self.positions) // len(self.table)
        rows = slice(first * queries, end * queries)
        return AttentionCall(
            self.query[rows], self.kv, self.table[first:end], self.positions[rows], self.rules
        )

    def queries(self, sequence: int, chosen: Sequence[int]) -> "AttentionCall":
        """Some query rows of one sequence alone."""
        queries = len(self.positions) // len(self.table)
        rows = [sequence * queries + query for query in chosen]
        table = self.table[sequence : sequence + 1]
        return AttentionCall(self.query[rows], self.kv, table, self.positions[rows], self.rules)


def build(
    seed: int, heads: Heads, positions: Sequence[Sequence[int]], rules: Rules, dtype: torch.dtype
) -> AttentionCall:
    """One sequence per entry of ``positions``, its queries' positions (negative: padding).

    Only keys that some query sees or that lie between such keys exist; the rest of the pool is
    NaN, as are padding queries, and the table names blocks that do not exist.
    """
    size = heads.block_size
    spans = [_span(row, rules.window) for row in positions]
    width = max(end for _, end in spans) // size + 2
    count = sum(-(-end // size) - first // size for first, end in spans)
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(count + 2, generator=generator)
    stray = torch.tensor(STRAY, dtype=torch.int32)
    table = stray[torch.arange(len(spans) * width) % len(STRAY)].view(len(spans), width)
    kv = torch.full((count + 2, heads.kv_heads, size, 2 * heads.head_size), torch.nan, dtype=dtype)
    for row, (first, end) in enumerate(spans):
        blocks = slice(first // size, -(-end // size))
        some, free = free.tensor_split([blocks.stop - blocks.start])
        table[row, blocks] = some.to(torch.int32)
        where = torch.arange(first, end)
        pair = random(seed + row, end - first, heads.kv_heads, 2 * heads.head_size, dtype=dtype)
        kv[table[row, where // size].long(), :, where % size] = pair
    where = torch.tensor([p for row in positions for p in row], dtype=torch.int32)
    query = random(
        seed + 100, len(where), heads.kv_heads * heads.group, heads.head_size, dtype=dtype
    )
    query[where < 0] = torch.nan
    return AttentionCall(spread(query), kv, spread(table), where, rules)


def _span(positions: Sequence[int], window: int) -> tuple[int, int]:
    """First visible position and the one after the last."""
    real = [position for position in positions if position >= 0]
    if not real:
        return 0, 0
    return (max(0, min(real) - window + 1) if window else 0), max(real) + 1


@st.composite
def query_positions(draw: st.DrawFn, queries: int) -> list[int]:
    """A run of positions that ends at an edge, then padding; here and there padding between."""
    last = draw(st.sampled_from(EDGES))
    real = draw(st.sampled_from((queries, 1, max(1, queries // 2))))
    run = [*range(max(0, last + 1 - real), last + 1)]
    run += [-1] * (queries - len(run))
    for hole in draw(st.lists(st.integers(0, queries - 1), max_size=3)):
        run[hole] = -1
    return run


@st.composite
def all_rules(draw: st.DrawFn, heads: int, dtype: torch.dtype) -> Rules:
    generator = torch.Generator().manual_seed(heads)
    sinks = torch.randn(heads, generator=generator)
    return Rules(
        window=draw(st.sampled_from(WINDOWS)),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        sinks=draw(st.sampled_from((None, spread(sinks), spread(sinks.to(dtype))))),
        slopes=spread(sinks.abs() / 4) if draw(st.booleans()) else None,
    )


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype, queries: Sequence[int]) -> AttentionCall:
    """Up to 3 sequences of one of these numbers of queries."""
    heads = Heads(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_size=draw(st.sampled_from((16, 32, 48, 64, 80, 112, 128, 256))),
        block_size=draw(st.sampled_from((1, 5, 16, 31, 128))),
    )
    count = draw(st.sampled_from(queries))
    rows = draw(st.lists(query_positions(count), min_size=1, max_size=3))
    rules = draw(all_rules(heads.kv_heads * heads.group, dtype))
    call = build(draw(st.integers(0, 1000)), heads, rows, rules, dtype)
    order = draw(st.sampled_from(([3, 2, 1, 0], [3, 1, 2, 0], [3, 2, 0, 1])))
    kv = spread(call.kv, gaps=draw(st.sampled_from(((), (3, 1), (0, 8, 2)))), order=order)
    index_dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return AttentionCall(call.query, kv, call.table, call.positions.to(index_dtype), rules)
