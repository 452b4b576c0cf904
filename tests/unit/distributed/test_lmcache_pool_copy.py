# SPDX-License-Identifier: Apache-2.0
"""Copies between the pool and chunks, against one token at a time."""

from __future__ import annotations

import random

import pytest
import torch

from rbln_vllm.distributed.kv_transfer.lmcache.pool_copy import (
    Run,
    load_chunk,
    runs_of,
    save_chunk,
)

LAYERS, BLOCKS, HEADS, BLOCK, PAIR = 2, 6, 3, 8, 4


def pool() -> list[torch.Tensor]:
    numbers = torch.arange(LAYERS * BLOCKS * HEADS * BLOCK * PAIR, dtype=torch.float32)
    return list(numbers.view(LAYERS, BLOCKS, HEADS, BLOCK, PAIR).clone())


def slots_of(blocks: list[int], first: int, count: int) -> list[int]:
    """Slots of tokens `first` to `first + count` of a request with these blocks."""
    tokens = range(first, first + count)
    return [blocks[token // BLOCK] * BLOCK + token % BLOCK for token in tokens]


EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1]


@pytest.mark.parametrize("blocks", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2], [2, 1, 0, 5, 4, 3]])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("count", EDGES)
def test_runs_are_the_slots_in_order(blocks: list[int], first: int, count: int) -> None:
    slots = slots_of(blocks, first, count)
    runs = runs_of(slots, BLOCK)
    assert [r.block * BLOCK + r.offset + i for r in runs for i in range(r.length)] == slots
    assert [r.token for r in runs] == [sum(r.length for r in runs[:i]) for i in range(len(runs))]
    assert len(runs) == len({(first + i) // BLOCK for i in range(count)})


def test_no_slots_are_no_runs() -> None:
    assert runs_of([], BLOCK) == []


@pytest.mark.parametrize("run", [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, 0)])
def test_impossible_runs(run: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="a place and a length"):
        Run(*run)


@pytest.mark.parametrize("count", EDGES)
def test_copies(count: int) -> None:
    for seed in range(20):
        blocks = random.Random(seed).sample(range(BLOCKS), BLOCKS)
        slots = slots_of(blocks, seed % BLOCK, count)
        runs, layers = runs_of(slots, BLOCK), pool()
        chunk = torch.full((LAYERS, HEADS, count, PAIR), -1.0)
        save_chunk(chunk, layers, runs)
        for layer in range(LAYERS):
            for token, slot in enumerate(slots):
                expected = layers[layer][slot // BLOCK, :, slot % BLOCK]
                assert chunk[layer, :, token].equal(expected)
        other = [torch.full_like(layer, -2.0) for layer in layers]
        load_chunk(chunk, other, runs)
        for found, source in zip(other, layers, strict=True):
            touched = torch.zeros(BLOCKS, BLOCK, dtype=torch.bool)
            for slot in slots:
                touched[slot // BLOCK, slot % BLOCK] = True
            mask = touched[:, None, :, None]
            assert found.equal(torch.where(mask, source, torch.full_like(source, -2.0)))
