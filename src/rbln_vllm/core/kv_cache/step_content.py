# SPDX-License-Identifier: Apache-2.0
"""What a step wrote, once it has come back: offered for prefix hits, or kept from them."""

from collections.abc import Mapping

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rbln_vllm.core.kv_cache.manager import SubBlockKVCacheManager


class StepContent:
    """Tells a manager of blocks, with sub-blocks or without, what became of a step."""

    def __init__(self, manager: KVCacheManager, kv_cache_config: KVCacheConfig) -> None:
        self._manager, self._groups = manager, kv_cache_config.kv_cache_groups
        self.sub_blocks = manager if isinstance(manager, SubBlockKVCacheManager) else None

    def release_copied(self, output: SchedulerOutput) -> None:
        """Lets go of the blocks that the step copied."""
        if self.sub_blocks is not None and output.kv_cache_block_copies:
            self.sub_blocks.release_copied()

    def withdraw(self, request_id: str, start: int) -> None:
        """The request's row, from position ``start`` on, was not written."""
        if self.sub_blocks is not None:
            self.sub_blocks.distrust(request_id)
        else:
            self._evict_from(request_id, start)

    def _evict_from(self, request_id: str, start: int) -> None:
        """Drops blocks from position ``start`` on; upstream offers them when it schedules."""
        held = self._manager.get_block_ids(request_id)
        for ids, group in zip(held, self._groups, strict=True):
            first = start // group.kv_cache_spec.block_size
            self._manager.evict_blocks(set(ids[first:]))

    def commit(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> list[KVCacheEvent]:
        """Offers what the step wrote for those of ``requests`` that it ran; returns the events."""
        if self.sub_blocks is None:
            return []
        for request_id in output.num_scheduled_tokens:
            request = requests.get(request_id)
            if request is not None:
                self.sub_blocks.commit(request)
        return self.sub_blocks.take_events()
