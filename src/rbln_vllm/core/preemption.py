# SPDX-License-Identifier: Apache-2.0
"""The blocks a running request can get: free ones, and those upstream would take from others."""

from collections.abc import Iterable

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


def lacks_blocks(scheduler: Scheduler, request: Request, end: int) -> bool:
    """Whether ``request``, which runs, can get too few blocks to hold ``end`` tokens.

    It can get the free blocks and those that only lower-ranked requests hold, which upstream
    would preempt for it.
    """
    manager = scheduler.kv_cache_manager
    missing = _missing_blocks(manager, scheduler.kv_cache_config, request, end)
    free = manager.block_pool.get_num_free_blocks()
    if missing <= free:
        return False
    return bool(missing > free + _held_alone(manager, _lower_ranked(scheduler, request)))


def _missing_blocks(
    manager: KVCacheManager, config: KVCacheConfig, request: Request, end: int
) -> int:
    held = manager.get_blocks(request.request_id).blocks
    return sum(
        max(0, -(-end // group.kv_cache_spec.block_size) - len(blocks))
        for group, blocks in zip(config.kv_cache_groups, held, strict=True)
    )


def _lower_ranked(scheduler: Scheduler, request: Request) -> list[Request]:
    """Returns the running requests that upstream would preempt before ``request``."""
    running = scheduler.running
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        rank = (request.priority, request.arrival_time)
        return [r for r in running if (r.priority, r.arrival_time) > rank]
    return list(running[running.index(request) + 1 :])


def _held_alone(manager: KVCacheManager, requests: Iterable[Request]) -> int:
    """Counts the blocks that each of ``requests`` shares with nobody."""
    tables = (manager.get_blocks(request.request_id).blocks for request in requests)
    return sum(block.ref_cnt == 1 for groups in tables for group in groups for block in group)
