# SPDX-License-Identifier: Apache-2.0
"""Too few blocks: preemption, deferral, and no step wasted on either."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from rbln_vllm.core.scheduler import RBLNScheduler
from rbln_vllm.core.step import StepKind
from rbln_vllm.core.turns import Turn, TurnPolicy
from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of


def preemptions(driver: Driver) -> int:
    return sum(request.num_preemptions for request in driver.requests.values())


def test_preemption_table(build: SchedulerFactory) -> None:
    """Six blocks for two requests that need four each: the later one is recomputed."""
    driver = Driver(build(blocks=7, max_len=24))
    driver.add("a", prompt_of(8, 1), max_tokens=8)
    driver.add("b", prompt_of(8, 2), max_tokens=8)
    driver.run().check_text()
    assert driver.table == [
        "P a[0:8] free=4 run=1 wait=1",
        "P b[0:8] free=2 run=2 wait=0",
        "D a,b free=0 run=2 wait=0",
        "D a,b free=0 run=2 wait=0",
        "D a,b free=0 run=2 wait=0",
        "D a,b free=0 run=2 wait=0",
        "D a free=2 run=1 wait=1",  # a needs a fourth block, b gives up its three
        "D a free=2 run=1 wait=1",  # b, now 13 tokens, needs four: no step is wasted on it
        "D a free=2 run=1 wait=1",
        "P b[0:8] free=4 run=1 wait=0",
        "P b[8:13] free=2 run=1 wait=0",
        "D b free=2 run=1 wait=0",
        "D b free=2 run=1 wait=0",
        "- free=6 run=0 wait=0",
    ]
    assert preemptions(driver) == 1


def test_d01_prompts_of_exactly_one_block(build: SchedulerFactory) -> None:
    """New prefills push decodes out of the step just when their second block is due."""
    driver = Driver(build(block=8, chunk=8, seqs=8, blocks=129))
    for i in range(24):
        driver.add(f"r{i}", prompt_of(8, i), max_tokens=12)
        driver.step()
        if i % 3 == 2:
            driver.step()
    driver.run().check_text()
    kinds = [plan.kind for plan in driver.plans]
    assert (StepKind.DECODE, StepKind.PREFILL) in set(pairwise(kinds))


def test_d02_blocks_of_a_preempted_request(build: SchedulerFactory) -> None:
    """The same with a pool so small that requests left out of a step are preempted."""
    driver = Driver(build(block=8, chunk=8, seqs=8, blocks=9, max_len=40))
    for i in range(12):
        driver.add(f"r{i}", prompt_of(8, i), max_tokens=20)
        driver.step()
    driver.run().check_text()
    assert preemptions(driver) > 3


def test_the_harness_sees_a_lost_grant(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it once was: the block is granted, and the runner never hears of it."""
    scheduler = build(block=8)
    upstream = scheduler.schedule

    def losing() -> SchedulerOutput:
        output = upstream()
        output.scheduled_cached_reqs.new_block_ids = [None] * output.scheduled_cached_reqs.num_reqs
        return output

    monkeypatch.setattr(scheduler, "schedule", losing)
    driver = Driver(scheduler)
    driver.add("a", prompt_of(8), max_tokens=4)
    driver.step()
    with pytest.raises(IndexError):
        driver.step()


def test_d07_a_long_prompt_alone_always_progresses(build: SchedulerFactory) -> None:
    """The prompt fills the pool to the last block; each step computes the next chunk."""
    driver = Driver(build(blocks=33, max_len=128))
    driver.add("a", prompt_of(127), max_tokens=1)
    driver.run(limit=17).check_text()
    assert [plan.tokens for plan in driver.plans[:-1]] == [(8,)] * 15 + [(7,)]


@pytest.mark.parametrize("prefix", [False, True])
def test_d09_preempted_requests_are_classed_by_tokens_left(
    build: SchedulerFactory, prefix: bool
) -> None:
    """Sixteen sequences on blocks for eight: same text as with a large pool."""
    driver = Driver(build(seqs=16, chunk=16, blocks=49, max_len=64, prefix=prefix))
    for i in range(16):
        driver.add(f"r{i}", prompt_of(5 + i, i), max_tokens=17)
    driver.run().check_text()
    assert preemptions(driver) > 3
    resumed = [plan for plan in driver.plans if plan.kind is StepKind.PREFILL]
    assert len(resumed) > 16 + 4  # prompts, and at least as many again as were preempted


def squeeze(build: SchedulerFactory, rank: int = 0, **options: Any) -> Driver:
    """Three decodes at a block edge, and a prefill between its first and second chunk.

    ``p`` has [0:8] of 24 tokens; 4 of 12 blocks are free, and the next decode batch takes 3.
    """
    driver = Driver(build(blocks=13, max_len=32, **options))
    for i in range(3):
        driver.add(f"d{i}", prompt_of(8, i), max_tokens=4, priority=i + 1)
    for _ in range(3):
        driver.step()
    driver.add("p", prompt_of(24, 9), max_tokens=2, priority=rank)
    driver.step()
    driver.scheduler.turns = TurnPolicy(1)
    return driver


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prefill_short_of_blocks_waits_for_decodes(build: SchedulerFactory, policy: str) -> None:
    driver = squeeze(build, policy=policy, rank=9)
    driver.run().check_text()
    assert driver.table[3:] == [
        "P p[0:8] free=4 run=4 wait=0",
        "D d0,d1,d2 free=1 run=4 wait=0",
        "D d0,d1,d2 free=1 run=4 wait=0",  # p needs two blocks and keeps those it has
        "D d0,d1,d2 free=1 run=4 wait=0",
        "P p[8:16] free=8 run=1 wait=0",
        "P p[16:24] free=6 run=1 wait=0",
        "D p free=5 run=1 wait=0",
        "- free=12 run=0 wait=0",
    ]
    assert preemptions(driver) == 0


def test_a_prefill_of_higher_rank_takes_blocks_as_upstream(build: SchedulerFactory) -> None:
    driver = squeeze(build, policy="priority")
    driver.run().check_text()
    assert driver.table[4:6] == [
        "D d0,d1,d2 free=1 run=4 wait=0",
        "P p[8:16] free=2 run=3 wait=1",
    ]
    # d2 pays for the second chunk, d1 for the block of p's first generated token.
    assert [driver.requests[r].num_preemptions for r in ("d0", "d1", "d2", "p")] == [0, 1, 1, 0]


def test_a_decode_step_may_preempt_the_prefill_it_left_out(build: SchedulerFactory) -> None:
    driver = Driver(build(blocks=12, max_len=32))
    for i in range(3):
        driver.add(f"d{i}", prompt_of(8, i), max_tokens=9)
    for _ in range(3):
        driver.step()
    driver.add("p", prompt_of(20, 9), max_tokens=2)
    driver.step()
    driver.scheduler.turns = TurnPolicy(1)
    driver.run().check_text()
    assert driver.requests["p"].num_preemptions == 1
    assert driver.requests["d0"].num_preemptions == 0


def test_a_waiting_request_never_preempts_as_upstream(build: SchedulerFactory) -> None:
    driver = Driver(build(blocks=7, max_len=24, policy="priority"))
    driver.add("low", prompt_of(16, 1), max_tokens=4, priority=9)
    driver.step()
    driver.add("high", prompt_of(12, 2), max_tokens=1, priority=0)
    driver.run().check_text()
    assert [row.split(" free")[0] for row in driver.table[:-1]] == [
        "P low[0:8]",
        "P low[8:16]",
        "D low",
        "D low",
        "D low",
        "P high[0:8]",
        "P high[8:12]",
    ]


def test_equal_ranks_do_not_waste_a_step(build: SchedulerFactory) -> None:
    """Upstream preempts the first of equals, which may be the one it is scheduling."""
    driver = Driver(build(blocks=7, max_len=24, policy="priority"))
    for i in range(3):
        driver.add(f"r{i}", prompt_of(8, i), max_tokens=8, arrival_time=1.0)
    driver.run().check_text()
    assert preemptions(driver) > 0


def test_the_watermark_holds_back_admission_only_beside_others(build: SchedulerFactory) -> None:
    driver = Driver(build(blocks=10, max_len=32, watermark=0.4))
    driver.add("a", prompt_of(8, 1), max_tokens=3)
    driver.add("b", prompt_of(16, 2), max_tokens=1)
    driver.run().check_text()
    assert [row.split(" free")[0] for row in driver.table[:-1]] == [
        "P a[0:8]",
        "D a",
        "D a",
        "P b[0:8]",
        "P b[8:16]",
    ]


def test_no_turn_is_lost_on_attempts_that_cannot_be_taken_back(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a connector an empty output must be emitted; then the decodes come first."""
    monkeypatch.setattr(RBLNScheduler, "_can_take_back", lambda self, output: False)
    driver = Driver(build(blocks=9, max_len=32), may_idle=True)
    for i in range(4):
        driver.add(f"r{i}", prompt_of(10, i), max_tokens=12)
    driver.run().check_text()
    empty = [plan.kind is StepKind.EMPTY for plan in driver.plans]
    assert any(empty)
    assert not any(a and b for a, b in pairwise(empty))


def test_what_a_dropped_attempt_carried_is_not_lost(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(build(blocks=9, max_len=32, seqs=3))
    driver.add("a", prompt_of(4, 1), max_tokens=1)
    driver.add("b", prompt_of(12, 2), max_tokens=6)
    for _ in range(4):
        driver.step()
    driver.add("c", prompt_of(28, 3), max_tokens=1)  # cannot be admitted beside b
    scheduler = driver.scheduler
    attempts = []
    attempt = scheduler._attempt

    def noted(turn: Turn, throttle_prefills: bool) -> SchedulerOutput:
        attempts.append(turn)
        return attempt(turn, throttle_prefills)

    monkeypatch.setattr(scheduler, "_attempt", noted)
    scheduler.finished_req_ids.add("gone")
    scheduler.reset_preempted_req_ids.add("evicted")
    scheduler.encoder_cache_manager.freed.append("image")
    step = scheduler.current_step

    output = scheduler.schedule()

    assert attempts == [Turn.PREFILL, Turn.DECODE]
    assert list(output.num_scheduled_tokens) == ["b"]
    assert output.finished_req_ids == {"gone"}
    assert output.preempted_req_ids == {"evicted"}
    assert output.free_encoder_mm_hashes == ["image"]
    assert scheduler.current_step == step + 1
    # b ran in the last step the runner saw, so its tokens are not sent again.
    assert not output.scheduled_cached_reqs.all_token_ids


def test_an_error_inside_upstream_leaves_no_restriction(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(build())
    driver.add("a", prompt_of(4), max_tokens=9)
    driver.step()
    scheduler = driver.scheduler
    driver.add("b", prompt_of(4, 1))
    limit = scheduler.max_num_active_reqs
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "kv_cache_manager", None)
        with pytest.raises(AttributeError):
            scheduler.schedule()
    assert scheduler.max_num_active_reqs == limit
    assert driver.requests["a"].next_decode_eligible_step <= scheduler.current_step


def test_upstreams_throttle_defers_prefills(build: SchedulerFactory) -> None:
    driver = Driver(build())
    driver.add("a", prompt_of(4), max_tokens=9)
    driver.step()
    driver.add("b", prompt_of(9, 1), max_tokens=1)
    scheduler = driver.scheduler
    assert list(scheduler.schedule(throttle_prefills=True).num_scheduled_tokens) == ["a"]


def test_d33_a_grammar_in_the_making_holds_no_prefill_slot(build: SchedulerFactory) -> None:
    driver = Driver(build(), may_idle=True)
    driver.add("a", prompt_of(4), max_tokens=9)
    driver.step()
    blocked = driver.add("g", prompt_of(9, 1))
    blocked.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    blocked.structured_output_request = SimpleNamespace(grammar=None)
    assert driver.step().request_ids == ("a",)
    driver.add("b", prompt_of(9, 2), max_tokens=1)
    assert driver.step().request_ids == ("b",)
    driver.abort("g")
    driver.run().check_text("a", "b")


def test_a_decode_batch_holds_no_more_adapters_than_slots(build: SchedulerFactory) -> None:
    driver = Driver(build())
    driver.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for i, adapter in enumerate((1, 2, 1)):
        request = driver.add(f"r{i}", prompt_of(4, i), max_tokens=3)
        request.lora_request = LoRARequest(f"l{adapter}", adapter, "/nowhere")
    driver.run().check_text()
    batches = [plan.request_ids for plan in driver.plans if plan.kind is StepKind.DECODE]
    assert ("r0", "r2") in batches
    assert all("r1" not in batch or batch == ("r1",) for batch in batches)
