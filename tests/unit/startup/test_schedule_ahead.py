# SPDX-License-Identifier: Apache-2.0
"""When the engine schedules one step ahead."""

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.config import RBLNConfig
from rbln_vllm.startup.schedule_ahead import may_schedule_ahead


def config(
    *,
    wanted: bool = True,
    executor: str = "uni",
    caching: bool = True,
    sub_blocks: bool = True,
    drafts: object = None,
    runner: str = "generate",
) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            async_scheduling=wanted,
            max_num_batched_tokens=256,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
        ),
        model_config=SimpleNamespace(max_model_len=2048, runner_type=runner),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, block_size=128),
        additional_config=RBLNConfig(enable_sub_block_cache=sub_blocks),
        speculative_config=drafts,
    )


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_it_is_done_where_it_is_wanted(executor: str) -> None:
    assert may_schedule_ahead(config(executor=executor))


def test_it_is_done_for_pooling() -> None:
    assert may_schedule_ahead(config(caching=False, runner="pooling"))


def test_it_is_not_done_where_it_is_not_wanted() -> None:
    assert not may_schedule_ahead(config(wanted=False))


def test_an_executor_that_overlaps_nothing_rules_it_out() -> None:
    assert not may_schedule_ahead(config(executor="external_launcher"))


def test_drafts_rule_it_out() -> None:
    assert not may_schedule_ahead(config(drafts=SimpleNamespace(method="ngram")))


@pytest.mark.parametrize(
    ("warm_up", "caching", "sub_blocks", "ahead"),
    [
        ("1", True, False, True),  # no step is ever refused
        ("0", True, True, True),  # a sub-block is offered when it is filled
        ("0", False, False, True),  # nothing is offered
        ("0", True, False, False),
    ],
)
def test_whole_blocks_of_steps_that_may_be_refused_rule_it_out(
    monkeypatch: pytest.MonkeyPatch, warm_up: str, caching: bool, sub_blocks: bool, ahead: bool
) -> None:
    monkeypatch.setenv("VLLM_RBLN_ENABLE_WARM_UP", warm_up)
    assert may_schedule_ahead(config(caching=caching, sub_blocks=sub_blocks)) is ahead
