# SPDX-License-Identifier: Apache-2.0
"""A paged KV pool laid out for tests, and attention written out in plain loops beside it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NAN = float("nan")


@dataclass(frozen=True)
class Sequence:
    """One row: its whole context unpaged ``[L, heads, D]`` and the positions of its queries."""

    keys: Tensor
    values: Tensor
    query_positions: tuple[int, ...]


@dataclass(frozen=True)
class Rules:
    """What changes the scores."""

    scale: float = 0.25
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


@dataclass(frozen=True)
class Shape:
    """Sizes of a test's attention."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32


def random_sequence(shape: Shape, context: int, queries: int, pad_to: int) -> Sequence:
    """A context of that length whose last ``queries`` positions are queried, then padding."""
    size = (context, shape.num_kv_heads, shape.head_size)
    real = range(context - queries, context)
    return Sequence(
        torch.randn(size).to(shape.dtype),
        torch.randn(size).to(shape.dtype),
        (*real, *[-1] * (pad_to - queries)),
    )


def poisoned_queries(shape: Shape, sequences: list[Sequence]) -> Tensor:
    """Random queries ``[B * Q, heads, D]``, NaN in padding rows."""
    positions = [p for sequence in sequences for p in sequence.query_positions]
    query = torch.randn(len(positions), shape.num_heads, shape.head_size).to(shape.dtype)
    query[[p < 0 for p in positions]] = NAN
    return query


@dataclass(frozen=True)
class Pool:
    """A KV pool that holds sequences at scattered blocks; all memory else is NaN."""

    kv_cache: Tensor
    block_table: Tensor


def pool_of(shape: Shape, sequences: list[Sequence], visible_from: list[int]) -> Pool:
    """Lay the sequences out. Block 0, unused blocks and the tails of last blocks stay NaN.

    Blocks wholly before ``visible_from`` of their sequence are given as block 0, as a KV manager
    gives those that a window has left behind.
    """
    size = shape.block_size
    counts = [math.ceil(len(s.keys) / size) for s in sequences]
    total = 1 + sum(counts) + 2
    kv_cache = torch.full(
        (total, shape.num_kv_heads, size, 2 * shape.head_size), NAN, dtype=shape.dtype
    )
    free = (torch.randperm(total - 1) + 1).tolist()
    table = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    for row, (sequence, start) in enumerate(zip(sequences, visible_from, strict=True)):
        for position in range(start // size * size, len(sequence.keys)):
            block, offset = divmod(position, size)
            if offset == 0:
                table[row, block] = free.pop()
            pair = torch.cat((sequence.keys[position], sequence.values[position]), dim=-1)
            kv_cache[int(table[row, block]), :, offset] = pair
    return Pool(kv_cache, table)


def plain_attention(query: Tensor, sequences: list[Sequence], rules: Rules) -> Tensor:
    """What attention should give, one query and head at a time, in fp64; padding rows are 0."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    row = 0
    for sequence in sequences:
        for position in sequence.query_positions:
            if position >= 0:
                for head in range(query.shape[1]):
                    kv_head = head * sequence.keys.shape[1] // query.shape[1]
                    output[row, head] = _one(
                        query[row, head].double(),
                        sequence.keys[: position + 1, kv_head].double(),
                        sequence.values[: position + 1, kv_head].double(),
                        head,
                        rules,
                    )
            row += 1
    return output


def _one(query: Tensor, keys: Tensor, values: Tensor, head: int, rules: Rules) -> Tensor:
    """One query, at the position of the last key, of one head."""
    distances = torch.arange(len(keys)).double() - (len(keys) - 1)
    if rules.window:
        keys, values = keys[-rules.window :], values[-rules.window :]
        distances = distances[-rules.window :]
    scores = keys @ query * rules.scale
    if rules.soft_cap:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    if rules.alibi_slopes is not None:
        scores = scores + rules.alibi_slopes[head].double() * distances
    weights = torch.exp(scores)
    sink = 0.0 if rules.sinks is None else rules.sinks[head].double().exp()
    return (weights / (weights.sum() + sink)) @ values
