# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV pool and chunks of consecutive tokens.

A pool layer is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a chunk of all layers
``[layers, num_kv_heads, tokens, 2 * head_size]``: the pool's own order, so that every run of tokens
within one block is one strided copy of whole rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Run:
    """``length`` tokens of a chunk from ``token`` on, at ``offset`` of pool block ``block``."""

    block: int
    offset: int
    token: int
    length: int

    def __post_init__(self) -> None:
        if min(self.block, self.offset, self.token) < 0 or self.length < 1:
            raise ValueError(f"a run needs a place and a length: {self}")


def runs_of(slots_T: Sequence[int], block_size: int) -> list[Run]:
    """Cut a chunk's slots (``block * block_size + offset`` of each token) where blocks change."""
    runs: list[Run] = []
    start = 0
    for end in range(1, len(slots_T) + 1):
        if (
            end < len(slots_T)
            and slots_T[end] % block_size
            and slots_T[end] == slots_T[end - 1] + 1
        ):
            continue
        block, offset = divmod(slots_T[start], block_size)
        runs.append(Run(block, offset, start, end - start))
        start = end
    return runs


def save_chunk(chunk_LHTE: Tensor, layers: Sequence[Tensor], runs: Sequence[Run]) -> None:
    """Copy runs of the pool's layers into a chunk."""
    for chunk_HTE, layer_BHSE in zip(chunk_LHTE, layers, strict=True):
        for run in runs:
            rows_HTE = layer_BHSE[run.block, :, run.offset : run.offset + run.length]
            chunk_HTE[:, run.token : run.token + run.length].copy_(rows_HTE)


def load_chunk(chunk_LHTE: Tensor, layers: Sequence[Tensor], runs: Sequence[Run]) -> None:
    """Copy runs of a chunk into the pool's layers."""
    for chunk_HTE, layer_BHSE in zip(chunk_LHTE, layers, strict=True):
        for run in runs:
            rows_HTE = chunk_HTE[:, run.token : run.token + run.length]
            layer_BHSE[run.block, :, run.offset : run.offset + run.length].copy_(rows_HTE)
