# SPDX-License-Identifier: Apache-2.0
"""Prefix hits inside a block: lengths, refusals, tight pools."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from rbln_vllm.core.kv_cache.copies import KVCopy
from rbln_vllm.core.scheduler import RBLNAsyncScheduler, RBLNScheduler
from tests.unit.core.harness import Driver, SchedulerFactory, make_request, prompt_of
from tests.unit.core.hits import BLOCK, CHUNK, MAX_LEN, SUB, driver_of, hit_of, run_alone

EDGES = sorted(
    {1, SUB - 1, SUB, SUB + 1, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK - 1, BLOCK, BLOCK + 1}
    | {2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, MAX_LEN - 2, MAX_LEN - 1}
)


# -- lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGES)
def test_a_repeated_prompt_hits_all_whole_sub_blocks_but_its_last_token(
    build: SchedulerFactory, length: int
) -> None:
    driver = driver_of(build)
    assert hit_of(driver, "cold", prompt_of(length)) == 0
    assert hit_of(driver, "warm", prompt_of(length)) == SUB * ((length - 1) // SUB)


@pytest.mark.parametrize("shared", EDGES)
def test_a_shared_prefix_hits_its_whole_sub_blocks(build: SchedulerFactory, shared: int) -> None:
    driver = driver_of(build, max_len=2 * MAX_LEN)
    prefix = prompt_of(shared)
    run_alone(driver, "first", [*prefix, *[90] * 9])
    assert hit_of(driver, "second", [*prefix, *[91] * 9]) == SUB * (shared // SUB)


def test_the_published_example(build: SchedulerFactory) -> None:
    """3,000 shared tokens, blocks of 4,096, sub-blocks of 128: 2,944 are found, 56 computed."""
    options: dict[str, Any] = {"block": 4096, "sub_block": 128, "chunk": 128, "max_len": 4096}
    scheduler = build(prefix=True, blocks=9, **options)
    for request_id, own in (("first", 1), ("second", 2)):
        prompt = [*prompt_of(3000), *prompt_of(500, own)]
        scheduler.add_request(make_request(request_id, prompt, block=4096, max_tokens=1))
    runner = Driver(scheduler).runner
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            hit = new.num_computed_tokens
            assert hit == (2944 if new.req_id == "second" else 0)
            copies = output.kv_cache_block_copies
            assert copies is None if hit == 0 else copies == [KVCopy(1, 2, 2944)]
        scheduler.update_from_output(output, runner.execute(output))


def test_whole_blocks_alone_would_find_nothing_there(build: SchedulerFactory) -> None:
    """The same with sub-blocks off: the tests above see what sub-blocks do."""
    scheduler = build(prefix=True, block=BLOCK, chunk=CHUNK, max_len=MAX_LEN)
    driver = Driver(scheduler)
    run_alone(driver, "cold", prompt_of(BLOCK - 1))
    run_alone(driver, "warm", prompt_of(BLOCK - 1))
    assert any(row.startswith("P warm[0:8]") for row in driver.table)


def test_generated_tokens_are_found(build: SchedulerFactory) -> None:
    """All but the last one, whose KV is never computed; also across the end of the prompt."""
    driver = driver_of(build)
    run_alone(driver, "turn 1", prompt_of(10), max_tokens=15)
    history = [*prompt_of(10), *driver.tokens["turn 1"]]
    assert hit_of(driver, "turn 2", [*history, 5, 6, 7]) == 24


def test_a_running_request_lends_what_it_has(build: SchedulerFactory) -> None:
    driver = driver_of(build, max_prefill_run=0)
    driver.add("long", prompt_of(30), max_tokens=12)
    while not driver.tokens["long"]:
        driver.step()
    driver.add("late", prompt_of(30))
    driver.step()
    assert driver.hits[-1] == 28
    driver.run().check_text()


# -- once per request ------------------------------------------------------------------------


def test_hits_are_counted_once_in_tokens(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing a request that is not admitted counts nothing and refreshes nothing."""
    driver = driver_of(build, blocks=6, log_stats=True)
    manager = driver.manager
    run_alone(driver, "cold", prompt_of(30))
    taken: list[PrefixCacheStats] = []
    take = manager.make_prefix_cache_stats

    def take_and_keep() -> PrefixCacheStats | None:
        stats = take()
        assert stats is not None
        taken.append(stats)
        return stats

    monkeypatch.setattr(manager, "make_prefix_cache_stats", take_and_keep)
    blocker = driver.add("blocker", prompt_of(62, 7), max_tokens=1)
    driver.step()
    request = driver.add("warm", prompt_of(30))
    for _ in range(5):
        assert manager.get_computed_blocks(request)[1] in (16, 28)
    driver.run()
    assert sum(stats.requests for stats in taken) == 2
    queries = blocker.num_prompt_tokens + request.num_prompt_tokens
    assert sum(stats.queries for stats in taken) == queries
    assert sum(stats.hits for stats in taken) == driver.hits[-1] > 0


def test_usage_reports_the_cached_tokens(build: SchedulerFactory) -> None:
    driver = driver_of(build)
    run_alone(driver, "cold", prompt_of(30))
    request = driver.add("warm", prompt_of(30), max_tokens=2)
    while request.num_computed_tokens == 0:
        driver.scheduler.schedule()
    assert request.prefill_stats is not None
    assert request.prefill_stats.num_cached_tokens == 28
    assert request.prefill_stats.num_local_cached_tokens == 28


# -- what is not offered ---------------------------------------------------------------------


@pytest.mark.parametrize("sub_block", [SUB, None])
def test_a_refused_step_leaves_nothing_behind(
    build: SchedulerFactory, sub_block: int | None
) -> None:
    """The runner did not write what the scheduler counts as computed."""
    options: dict[str, Any] = {"block": 8, "chunk": 16, "max_len": MAX_LEN, "sub_block": sub_block}
    driver = Driver(build(prefix=True, **options))
    driver.runner.refuse["victim"] = "no program"
    driver.add("victim", prompt_of(16))
    driver.run()
    driver.add("next", prompt_of(17))
    driver.run()
    driver.check_text("next")
    assert any(row.startswith("P next[0:16]") for row in driver.table)


def test_refused_after_a_chunk_keeps_that_chunk(build: SchedulerFactory) -> None:
    driver = driver_of(build)
    driver.add("victim", prompt_of(24))
    driver.step()
    driver.runner.refuse["victim"] = "no program"
    driver.run()
    assert hit_of(driver, "next", prompt_of(24)) == CHUNK


@pytest.mark.parametrize("cls", [RBLNScheduler, RBLNAsyncScheduler])
def test_nothing_in_flight_is_offered(build: SchedulerFactory, cls: type[RBLNScheduler]) -> None:
    """With the output one step late, a hit is what steps that have come back wrote."""
    options: dict[str, Any] = {"block": BLOCK, "sub_block": SUB, "chunk": CHUNK}
    driver = Driver(build(prefix=True, cls=cls, **options), depth=2, may_idle=True)
    manager = driver.scheduler.step_content.sub_blocks
    assert manager is not None
    driver.add("first", prompt_of(24))
    probe = make_request("probe", prompt_of(24), block=BLOCK)
    hits = []
    for _ in range(4):
        driver.step()
        hits.append(manager.get_computed_blocks(probe)[1])
    assert hits == [0, 8, 16, 20]
    manager.free(probe)
    manager._chains.clear()
    driver.run()


@pytest.mark.parametrize("when", range(12))
def test_an_abort_at_any_step_leaves_the_pool_as_it_was(build: SchedulerFactory, when: int) -> None:
    """Hits, chunks and decodes, in flight and between steps; the driver checks every step."""
    for in_flight in (True, False):
        driver = driver_of(build, blocks=8)
        run_alone(driver, "cold", prompt_of(30))
        driver.add("victim", [*prompt_of(22), *prompt_of(20, 3)], max_tokens=5)
        for _ in range(when):
            driver.step()
        alive = "victim" in driver.scheduler.requests
        if in_flight and alive:
            driver.step(abort_in_flight=["victim"])
        elif alive:
            driver.abort("victim")
        driver.run()
        assert hit_of(driver, "after", prompt_of(30)) > 0


def test_a_whole_pool_is_not_kept_from_a_request_by_its_own_source(
    build: SchedulerFactory,
) -> None:
    """4 blocks, all needed: the copy's source cannot stay beside them, so it is not used."""
    driver = driver_of(build, blocks=5)
    run_alone(driver, "cold", prompt_of(62))
    assert hit_of(driver, "warm", prompt_of(62)) == 48
    assert driver.shortened == 1


def test_rejected_drafts_are_not_offered(build: SchedulerFactory) -> None:
    """What a step computed beyond the accepted tokens is not what the tokens say."""
    driver = driver_of(build)
    request = driver.add("r", prompt_of(7), max_tokens=20)
    driver.step()
    assert driver.manager.index.count(1) == 1
    request.num_computed_tokens += 3  # as scheduled with three drafts ...
    request.num_in_flight_tokens += 3
    driver.manager.commit(request)
    assert driver.manager.index.count(1) == 1
    request.num_computed_tokens -= 3  # ... and come back with all of them rejected
    request.num_in_flight_tokens -= 3
    driver.manager.commit(request)
    assert driver.manager.index.count(1) == 1
    driver.run()


# -- other layers ----------------------------------------------------------------------------


def test_sliding_windows_are_hit_inside_a_block(build: SchedulerFactory) -> None:
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=BLOCK
    )
    scheduler = build(
        prefix=True, block=BLOCK, sub_block=SUB, chunk=CHUNK, max_len=MAX_LEN, spec=spec
    )
    manager = scheduler.step_content.sub_blocks
    assert manager is not None
    first = make_request("first", prompt_of(40), block=BLOCK, max_tokens=1)
    scheduler.add_request(first)
    second = make_request("second", prompt_of(40), block=BLOCK, max_tokens=1)
    assert manager.get_computed_blocks(second)[1] == 0
    granted = manager.allocate_slots(first, 40, num_new_computed_tokens=0)
    assert granted is not None
    first.num_computed_tokens = 40
    manager.commit(first)
    assert manager.get_computed_blocks(second)[1] == 36


def test_a_recurrent_state_has_no_sub_blocks(build: SchedulerFactory) -> None:
    spec = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="MambaSpec, which has no sub-blocks"):
        build(prefix=True, block=BLOCK, sub_block=SUB, chunk=CHUNK, spec=spec)
