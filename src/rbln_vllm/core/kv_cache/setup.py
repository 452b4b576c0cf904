# SPDX-License-Identifier: Apache-2.0
"""Decides at start-up whether a scheduler caches by sub-blocks, and makes its manager."""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from rbln_vllm.core.kv_cache.chain import SubBlockHasher
from rbln_vllm.core.kv_cache.manager import SubBlockKVCacheManager, SubBlockSettings
from rbln_vllm.core.kv_cache.rules import sub_block_rules

logger = init_logger(f"vllm.{__name__}")

# Caches whose slots are written once and in order. Other kinds keep a running state or move
# their content, and half a block of them is worth nothing to another request.
ELIGIBLE = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def ineligible_layers(kv_cache_config: KVCacheConfig) -> str | None:
    """Returns in words why the model's layers rule sub-blocks out, None if they do not."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model's layers need {len(groups)} groups of KV blocks, and it works with one"
    kind = type(groups[0].kv_cache_spec)
    if kind not in ELIGIBLE:
        return f"the model's KV cache is a {kind.__name__}, which has no sub-blocks"
    return None


def make_manager(scheduler: Scheduler) -> SubBlockKVCacheManager | None:
    """Returns the manager that takes the place of ``scheduler``'s, None for whole blocks.

    Raises:
        ValueError: the user asked for a sub-block size that cannot work.
    """
    config, kv_cache_config = scheduler.vllm_config, scheduler.kv_cache_config
    size = sub_block_rules(config).settle(ineligible_layers(kv_cache_config))
    if size is None:
        return None
    _log(scheduler, size)
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    settings = SubBlockSettings(
        hasher=SubBlockHasher(size, function),
        lookahead=scheduler.num_lookahead_tokens,
        has_connector=scheduler.connector is not None,
    )
    return SubBlockKVCacheManager(kv_cache_config, settings, **_upstream_options(scheduler, config))


def _upstream_options(scheduler: Scheduler, config: VllmConfig) -> dict[str, Any]:
    """What vLLM's scheduler gives its own manager."""
    return {
        "max_model_len": scheduler.max_model_len,
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "enable_caching": True,
        "use_eagle": scheduler.use_eagle_block_drop,
        "num_prefill_lookahead": scheduler.num_prefill_lookahead,
        "log_stats": scheduler.log_stats,
        "enable_kv_cache_events": scheduler.enable_kv_cache_events,
        "dcp_world_size": scheduler.dcp_world_size,
        "scheduler_block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "metrics_collector": scheduler.kv_metrics_collector,
        "watermark": scheduler.scheduler_config.watermark,
    }


def _log(scheduler: Scheduler, size: int) -> None:
    logger.info(
        "Sub-block prefix caching enabled: block_size=%d, sub_block_size=%d",
        scheduler.block_size,
        size,
    )
    if scheduler.enable_kv_cache_events:
        logger.info("KV events are by sub-blocks: routers must use a block size of %d", size)
