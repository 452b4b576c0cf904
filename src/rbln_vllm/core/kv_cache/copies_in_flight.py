# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks from when the scheduler orders them until their step has come back."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from rbln_vllm.core.kv_cache.copies import KVCopy


@dataclass(frozen=True)
class CopyStep:
    """What a step with copies keeps until it comes back: both ends, and the rows they are for."""

    blocks: list[KVCacheBlock]
    request_ids: list[str]


class CopiesInFlight:
    """The steps that copy, oldest first. Their blocks stay referenced by whoever took them."""

    def __init__(self) -> None:
        # Requests of the copies ordered since copies were last taken, and their lengths.
        self._ordered: list[tuple[str, int]] = []
        self._steps: deque[CopyStep] = deque()

    def __iter__(self) -> Iterator[CopyStep]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def order(self, request_id: str, num_tokens: int) -> None:
        """Notes that the first ``num_tokens`` slots of a block are to be copied for the request."""
        self._ordered.append((request_id, num_tokens))

    def take(self, pairs: Sequence[tuple[KVCacheBlock, KVCacheBlock]]) -> list[KVCopy]:
        """Returns the next step's copies: from and to ``pairs``, in the order they were ordered."""
        ordered, self._ordered = self._ordered, []
        blocks = [block for pair in pairs for block in pair]
        self._steps.append(CopyStep(blocks, [request_id for request_id, _ in ordered]))
        return [
            KVCopy(source.block_id, destination.block_id, length)
            for (source, destination), (_, length) in zip(pairs, ordered, strict=True)
        ]

    def pop_oldest(self) -> CopyStep:
        """Returns the oldest step, which has come back, and forgets it."""
        return self._steps.popleft()
