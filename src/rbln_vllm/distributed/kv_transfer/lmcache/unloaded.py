# SPDX-License-Identifier: Apache-2.0
"""Blocks that were promised to a request and could not be loaded."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def evict_unloaded(
    manager: "KVCacheManager", request_ids: Iterable[str], unloaded: set[int]
) -> None:
    """Take blocks that could not be loaded, and those computed on them, out of the prefix cache.

    vLLM leaves them in, since their request computes them again; if it is aborted or preempted
    before that, another request would find them.
    """
    for request_id in request_ids:
        (blocks,) = manager.get_block_ids(request_id)
        first = next((i for i, block in enumerate(blocks) if block in unloaded), None)
        if first is not None:
            manager.evict_blocks(set(blocks[first:]))
