# SPDX-License-Identifier: Apache-2.0
"""KV events at sub-block grain, in vLLM's own event types.

``BlockStored`` says that a sub-block has got its first holder, ``BlockRemoved`` that it has lost
its last. One event per sub-block is stored: routers that build a tree with one edge per event
cannot hang a child into the middle of an edge. A child is announced after its parent; when a
parent goes first, its children cannot be hit and a mirror must not count them.
"""

from collections.abc import Sequence

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.request import Request

from rbln_vllm.core.kv_cache.chain import HashChain

# There is one group of blocks for all layers.
GROUP = 0


class SubBlockEvents:
    """The events since they were last taken; ``kind`` and ``window`` describe the layers."""

    def __init__(self, size: int, kind: str, window: int | None) -> None:
        self._size, self._kind, self._window = size, kind, window
        self._queue: list[KVCacheEvent] = []

    def stored(self, request: Request, chain: HashChain, index: int) -> None:
        """Announces sub-block ``index`` of ``request``."""
        parent = chain.parent(index)
        adapter = request.lora_request
        start = index * self._size
        self._queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(chain.hashes[index])],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=request.all_token_ids[start : start + self._size],
                block_size=self._size,
                lora_id=adapter.adapter_id if adapter else None,
                medium=MEDIUM_GPU,
                lora_name=adapter.name if adapter else None,
                extra_keys=to_event_extra_keys([chain.extra_keys[index]]),
                group_idx=GROUP,
                kv_cache_spec_kind=self._kind,
                kv_cache_spec_sliding_window=self._window,
                session_id=request.session_id,
            )
        )

    def removed(self, names: Sequence[BlockHash]) -> None:
        """Announces that nothing holds ``names`` any more; children come before parents."""
        if names:
            hashes = [maybe_convert_block_hash(name) for name in names]
            self._queue.append(
                BlockRemoved(block_hashes=hashes, medium=MEDIUM_GPU, group_idx=GROUP)
            )

    def cleared(self) -> None:
        """Announces that nothing is held."""
        self._queue.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """Returns the events and forgets them."""
        events, self._queue = self._queue, []
        return events
