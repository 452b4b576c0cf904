# SPDX-License-Identifier: Apache-2.0
"""When the engine may schedule the next step while one runs (vLLM's ``async_scheduling``)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from rbln_vllm import envs
from rbln_vllm.core.kv_cache.rules import sub_block_rules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OVERLAPPED_EXECUTOR = "rbln_vllm.executor.overlapped.OverlappedExecutor"
OVERLAPPING_EXECUTORS = ("uni", "mp", OVERLAPPED_EXECUTOR)

logger = init_logger("vllm.rbln.schedule_ahead")


def may_schedule_ahead(vllm_config: "VllmConfig") -> bool:
    """Whether it is asked for (vLLM's default) and nothing rules it out, which is warned of."""
    if not vllm_config.scheduler_config.async_scheduling:
        return False
    for reason, holds in _REASONS_AGAINST:
        if holds(vllm_config):
            logger.warning_once("Disabling asynchronous scheduling: %s", reason)
            return False
    return True


def _nothing_overlaps(vllm_config: "VllmConfig") -> bool:
    return vllm_config.parallel_config.distributed_executor_backend not in OVERLAPPING_EXECUTORS


def _hits_what_may_be_refused(vllm_config: "VllmConfig") -> bool:
    """Upstream offers a block for hits when it schedules the step that fills it.

    A step that is refused, since its program may not be compiled now, fills nothing; a step
    scheduled ahead of that news would read it. Sub-blocks are offered only when they are filled.
    """
    refusable = not envs.enable_warm_up()  # otherwise every program is there from the start
    caching = bool(vllm_config.cache_config.enable_prefix_caching)
    return refusable and caching and sub_block_rules(vllm_config).settle() is None


def _drafts(vllm_config: "VllmConfig") -> bool:
    return vllm_config.speculative_config is not None


_REASONS_AGAINST: tuple[tuple[str, Callable[["VllmConfig"], bool]], ...] = (
    (
        "with this executor nothing runs while a step does. Leave out "
        "--distributed-executor-backend to have it",
        _nothing_overlaps,
    ),
    (
        "prefixes are cached by whole blocks and programs may be missing. Cache by sub-blocks, or "
        "compile all programs at start (VLLM_RBLN_ENABLE_WARM_UP=1)",
        _hits_what_may_be_refused,
    ),
    (
        "with speculative decoding a step is scheduled when the drafts of the step before are "
        "known",
        _drafts,
    ),
)
