# SPDX-License-Identifier: Apache-2.0
"""Load or compute: from measured rates, and once per admission."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import make_offload_key

from rbln_vllm.distributed.kv_transfer.offload.costs import PROBE_EVERY, Costs, Rate, Tier
from rbln_vllm.distributed.kv_transfer.offload.options import LoadPolicy
from rbln_vllm.distributed.kv_transfer.offload.planner import ChunkShape, LoadPlanner
from rbln_vllm.distributed.kv_transfer.offload.rate_limit import RateLimit

M, D = Tier.MEMORY, Tier.DISK
CHUNK, BYTES = 32, 1000
SHAPE = ChunkShape(tokens=CHUNK, hashes=2, num_bytes=BYTES, group=0)


class TestRate:
    def test_nothing_is_known_before_the_first_measurement(self) -> None:
        assert Rate().per_second() is None
        assert Rate().seconds_for(5) is None

    def test_long_measurements_weigh_more(self) -> None:
        rate = Rate()
        rate.observe(1000, 1.0)
        rate.observe(1, 0.1)  # a small load that mostly waited
        assert rate.per_second() == pytest.approx((0.8 * 1000 + 1) / (0.8 + 0.1))

    def test_it_follows_a_change(self) -> None:
        rate = Rate()
        rate.observe(1000, 1.0)
        for _ in range(30):
            rate.observe(10, 1.0)
        assert rate.per_second() == pytest.approx(10, rel=0.1)

    def test_impossible_measurements_are_dropped(self) -> None:
        rate = Rate()
        rate.observe(0, 1)
        rate.observe(1, 0)
        assert rate.per_second() is None


def costs(prefill: float | None, memory: float | None, disk: float | None) -> Costs:
    """Tokens and bytes per second."""
    made = Costs()
    for rate, value in ((made.prefill, prefill), (made.loads[M], memory), (made.loads[D], disk)):
        if value is not None:
            rate.observe(value, 1.0)
    return made


class TestCosts:
    @pytest.mark.parametrize(
        ("tier", "rates", "cheaper"),
        [
            (M, (100, 1001, None), True),
            (M, (100, 999, None), False),
            (D, (100, 2000, 2001), True),
            (D, (100, 2000, 1999), False),  # disk to memory, then memory to pool
            (M, (None, 1, None), True),
            (M, (100, None, None), True),
            (D, (100, None, 999), False),
        ],
    )
    def test_comparison(self, tier: Tier, rates: tuple[Any, ...], cheaper: bool) -> None:
        assert costs(*rates).compare(tier, 100, 1000).load_is_cheaper is cheaper

    def test_a_slow_load_is_tried_again_now_and_then(self) -> None:
        slow = costs(100, 1, None)
        comparison = slow.compare(M, 100, 1000)
        taken = [slow.worth_loading(M, comparison) for _ in range(3 * PROBE_EVERY)]
        assert [i for i, yes in enumerate(taken) if yes] == [
            n * PROBE_EVERY - 1 for n in range(1, 4)
        ]


class FakeManager:
    """Chunk `i` of the one prompt lies in `tiers[i]`."""

    def __init__(self, tiers: Sequence[Tier | None], memory_blocks: int = 100) -> None:
        self.memory_blocks, self.asked = memory_blocks, 0
        self._tiers = {
            make_offload_key(hash_of(2 * index + 1), 0): tier for index, tier in enumerate(tiers)
        }

    def tier_of(self, key: bytes, context: object) -> Tier | None:
        self.asked += 1
        return self._tiers.get(key)


def hash_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


def planner(
    tiers: Sequence[Tier | None],
    rates: Costs,
    policy: LoadPolicy = LoadPolicy.MEASURED,
    **more: Any,
) -> LoadPlanner:
    manager: Any = FakeManager(tiers, **more)
    return LoadPlanner(manager, rates, policy, SHAPE)


def loadable(plan: LoadPlanner, num_tokens: int, computed: int = 0) -> int:
    hashes = [hash_of(index) for index in range(num_tokens // (CHUNK // 2))]
    return plan.loadable_tokens("request", hashes, num_tokens, computed)


FAST = (100, 1e9, 1e9)


class TestPlanner:
    @pytest.mark.parametrize(
        ("num_tokens", "chunks"),
        [
            (1, 0),
            (CHUNK, 0),
            (CHUNK + 1, 1),
            (2 * CHUNK - 1, 1),
            (2 * CHUNK, 1),
            (2 * CHUNK + 1, 2),
        ],
    )
    def test_one_token_is_left_to_compute(self, num_tokens: int, chunks: int) -> None:
        assert loadable(planner([M] * 5, costs(*FAST)), num_tokens) == chunks * CHUNK

    @pytest.mark.parametrize(
        ("tiers", "chunks"),
        [([], 0), ([None, M], 0), ([M, None, M], 1), ([M, D, M], 3), ([D], 1)],
    )
    def test_a_prefix_without_gaps(self, tiers: list[Tier | None], chunks: int) -> None:
        assert loadable(planner(tiers, costs(*FAST)), 5 * CHUNK) == chunks * CHUNK

    @pytest.mark.parametrize(("computed", "tokens"), [(0, 96), (CHUNK, 64), (96, 0), (128, 0)])
    def test_what_the_pool_holds_is_not_loaded(self, computed: int, tokens: int) -> None:
        assert loadable(planner([M] * 3, costs(*FAST)), 5 * CHUNK, computed) == tokens

    def test_memory_can_be_worth_it_where_the_disk_is_not(self) -> None:
        slow_disk = costs(100, 1e9, 1)
        assert loadable(planner([M, M, D, M], slow_disk), 5 * CHUNK) == 2 * CHUNK
        assert loadable(planner([D, M], slow_disk), 5 * CHUNK) == 0
        assert loadable(planner([D, M], slow_disk, LoadPolicy.ALWAYS), 5 * CHUNK) == 2 * CHUNK

    def test_no_more_than_memory_holds_at_once(self) -> None:
        assert loadable(planner([D] * 9, costs(*FAST), memory_blocks=4), 9 * CHUNK) == 4 * CHUNK

    def test_a_request_is_decided_once_until_it_is_admitted(self) -> None:
        rates = costs(100, 1e9, None)
        plan = planner([M] * 3, rates)
        assert loadable(plan, 4 * CHUNK) == 3 * CHUNK
        rates.loads[M].observe(1, 1e12)
        assert loadable(plan, 4 * CHUNK) == 3 * CHUNK
        plan.admitted("request")
        assert loadable(plan, 4 * CHUNK) == 0
        plan.finished("request")
        assert not plan._ends

    def test_nothing_is_loaded_after_a_failure(self) -> None:
        plan = planner([M] * 3, costs(*FAST))
        plan.load_failed("request")
        assert loadable(plan, 4 * CHUNK) == 0
        plan.finished("request")
        assert loadable(plan, 4 * CHUNK) == 3 * CHUNK


def test_rate_limit_counts_what_it_holds_back() -> None:
    clock = SimpleNamespace(now=0.0)
    limit = RateLimit(10, lambda: clock.now)
    assert [limit.passes() for _ in range(3)] == [0, None, None]
    clock.now = 10.0
    assert [limit.passes() for _ in range(2)] == [2, None]
