# SPDX-License-Identifier: Apache-2.0
"""Learns from vLLM's block pool when the content of a block is gone.

The pool tells its metrics collector before it hands a block out anew, when it evicts one on
order, and when it is reset. That is the pool's one observer, so a collector the user asked for
is served from here.
"""

from collections.abc import Callable

from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class ResidencyObserver(KVCacheMetricsCollector):
    """Calls ``on_lost(block_id)`` and ``on_reset()``; passes everything on to ``collector``."""

    def __init__(
        self,
        on_lost: Callable[[int], None],
        on_reset: Callable[[], None],
        collector: KVCacheMetricsCollector | None,
    ) -> None:
        super().__init__()
        self._on_lost, self._on_reset, self._collector = on_lost, on_reset, collector

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        if self._collector is not None:
            self._collector.on_block_allocated(block)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if self._collector is not None:
            self._collector.on_block_accessed(block)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        self._on_lost(block.block_id)
        if self._collector is not None:
            self._collector.on_block_evicted(block)

    def reset(self) -> None:
        self._on_reset()
        if self._collector is not None:
            self._collector.reset()
