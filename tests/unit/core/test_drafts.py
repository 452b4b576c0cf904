# SPDX-License-Identifier: Apache-2.0
"""Drafts in the scheduler: text stays what it is, nothing is written where it may not be."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.core.drafts import cut_to_blocks, cut_to_step
from rbln_vllm.core.limits import blocks_for
from rbln_vllm.core.step import StepKind
from tests.unit.core.drafting import DraftingDriver
from tests.unit.core.fake_runner import sample
from tests.unit.core.harness import SchedulerFactory, expected_tokens, prompt_of
from tests.unit.core.test_random_traffic import MAX_LEN, random_options, traffic


def driver_of(
    build: SchedulerFactory, drafts: int = 3, lookahead: int = 0, seed: int = 0, **options: Any
) -> DraftingDriver:
    """``lookahead`` slots for KV of a drafter's own, as with EAGLE."""
    scheduler = build(drafts=drafts, **options)
    scheduler.num_lookahead_tokens = lookahead
    return DraftingDriver(scheduler, random.Random(seed))


def request_of(drafts: int, computed: int = 10, output: int = 0, most: int = 100) -> Any:
    return SimpleNamespace(
        spec_token_ids=list(range(drafts)),
        num_computed_tokens=computed,
        num_output_tokens=output,
        max_tokens=most,
    )


class TestCuts:
    @pytest.mark.parametrize(
        ("budget", "left"), [(100, 5), (12, 5), (11, 4), (4, 1), (3, 0), (2, 0), (1, 0)]
    )
    def test_a_step_is_shared_equally(self, budget: int, left: int) -> None:
        rows = [request_of(5), request_of(5)]
        cut_to_step(rows, budget)
        assert [len(row.spec_token_ids) for row in rows] == [left, left]

    @pytest.mark.parametrize(("output", "left"), [(0, 5), (4, 5), (5, 4), (8, 1), (9, 0), (10, 0)])
    def test_no_more_than_can_still_be_output(self, output: int, left: int) -> None:
        row = request_of(5, output=output, most=10)
        cut_to_step([row], 100)
        assert row.spec_token_ids == list(range(left))

    @pytest.mark.parametrize(
        ("computed", "lookahead", "left"),
        [(10, 0, 5), (11, 0, 4), (14, 0, 1), (15, 0, 0), (16, 0, 0), (8, 2, 5), (9, 2, 4)],
    )
    def test_no_more_than_blocks_hold(self, computed: int, lookahead: int, left: int) -> None:
        row = request_of(5, computed)
        cut_to_blocks(row, blocks=4, block_size=4, lookahead=lookahead)
        assert len(row.spec_token_ids) == left

    def test_nobody_decodes(self) -> None:
        cut_to_step([], 10)


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("seed", range(60))
def test_text_is_what_it_is_without_drafts(
    build: SchedulerFactory, seed: int, lookahead: int
) -> None:
    rng = random.Random(seed)
    options = random_options(rng)
    options["chunk"] = max(options["chunk"], options["seqs"])
    driver = driver_of(build, rng.choice([1, 2, 5]), lookahead, seed, **options)
    aborted = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - aborted))


@pytest.mark.parametrize("seed", range(40))
def test_prefixes_within_blocks_are_those_of_accepted_tokens(
    build: SchedulerFactory, seed: int
) -> None:
    """Sub-blocks: what is offered for hits was written for these tokens; stops cut drafts off."""
    rng = random.Random(seed)
    options = {**random_options(rng), "prefix": True, "block": 8, "sub_block": rng.choice([2, 4])}
    options["blocks"] = blocks_for(MAX_LEN, 8) + rng.choice([0, 1, 3, 20])
    driver = driver_of(build, rng.choice([2, 5]), seed=seed, **options)
    aborted = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - aborted))


def test_the_sweep_reaches_what_it_is_for(build: SchedulerFactory) -> None:
    accepted = rejected = preempted = 0
    for seed in range(15):
        rng = random.Random(seed)
        driver = driver_of(build, 3, seed=seed, **random_options(rng))
        traffic(driver, rng)
        driver.run()
        accepted += driver.runner.accepted
        rejected += driver.runner.rejected
        preempted += sum(r.num_preemptions for r in driver.requests.values())
    assert min(accepted, rejected) > 100
    assert preempted > 0


@pytest.mark.parametrize("left", [1, 2, 3, 4, 5, 6, 7])
def test_the_end_of_the_context(build: SchedulerFactory, left: int) -> None:
    """No position past the end is scheduled, and the request ends with its length."""
    driver = driver_of(build, 4, block=4, max_len=32, blocks=blocks_for(32, 4))
    driver.add("r", prompt_of(32 - left), max_tokens=20)
    driver.run()
    driver.check_text()
    assert driver.finished["r"].reason == "length"
    assert len(driver.tokens["r"]) == left


def test_rows_share_a_narrow_step(build: SchedulerFactory) -> None:
    """Eight tokens a step, four rows: one draft each; upstream would leave rows out."""
    driver = driver_of(build, 5, chunk=8, seqs=4, blocks=65)
    for row in range(4):
        driver.add(f"r{row}", prompt_of(5, row), max_tokens=12 if row else 60)
    driver.run()
    driver.check_text()
    full = [plan for plan in driver.plans if len(plan.request_ids) == 4]
    assert full
    assert max(max(plan.tokens) for plan in full) == 2
    decodes = [plan for plan in driver.plans if plan.kind is StepKind.DECODE]
    assert max(max(plan.tokens) for plan in decodes) == 6, "alone, a row has all its drafts"


@pytest.mark.parametrize("drafts", [0, 3])
def test_guesses_preempt_nobody(
    build: SchedulerFactory, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five blocks: the long row's drafts want a third while the short row has the other three."""
    driver = driver_of(build, drafts, block=4, blocks=6, max_len=20, chunk=12)
    monkeypatch.setattr(driver.runner, "_guess", lambda _tokens: [0] * drafts)
    driver.add("long", prompt_of(5), max_tokens=14)
    driver.add("short", prompt_of(9, 1), max_tokens=3)
    driver.run()
    driver.check_text()
    assert [request.num_preemptions for request in driver.requests.values()] == [0, 0]
    assert bool(driver.runner.rejected) is bool(drafts)


def test_a_first_decode_step_is_not_padded_with_drafts(build: SchedulerFactory) -> None:
    """After a hit that leaves one token upstream would schedule drafts that are none."""
    driver = driver_of(build, 3, prefix=True, block=4, blocks=33)
    for name in ("cold", "warm"):
        driver.add(name, prompt_of(9), max_tokens=4)
        driver.run()
    driver.check_text()
    first = next(plan for plan in driver.plans if "warm" in plan.request_ids)
    assert first.kind is StepKind.DECODE
    assert first.tokens == (1,)


@pytest.mark.parametrize("when", range(12))
def test_an_abort_at_every_step(build: SchedulerFactory, when: int) -> None:
    driver = driver_of(build, 3, seed=when, prefix=True, block=8, sub_block=2, blocks=20)
    driver.add("a", prompt_of(11), max_tokens=12)
    driver.add("b", prompt_of(13, 1), max_tokens=12)
    for step in range(12):
        dies = step == when and "a" in driver.scheduler.requests
        driver.step(abort_in_flight=["a"] if dies else [])
    driver.run()
    driver.check_text("b")


def test_what_is_computed_behind_a_stop_is_not_offered(build: SchedulerFactory) -> None:
    """A request that stops at an accepted draft has computed more tokens than it has."""
    driver = driver_of(build, 5, prefix=True, block=8, sub_block=2, blocks=20, max_len=64)
    driver.runner._guess = right_guesses  # type: ignore[method-assign]
    computed_beyond = 0
    for stop in range(1, 12):
        want = expected_tokens(prompt_of(9, stop), stop + 1, 64)
        request = driver.add(f"r{stop}", prompt_of(9, stop), max_tokens=30)
        request.sampling_params.stop_token_ids = [want[-1]]
        driver.run()
        assert driver.tokens[f"r{stop}"] == want[: want.index(want[-1]) + 1]
        computed_beyond += request.num_computed_tokens > request.num_tokens
    assert computed_beyond > 3


def right_guesses(tokens: Sequence[int]) -> list[int]:
    context = list(tokens)
    for _ in range(5):
        context.append(sample(context))
    return context[len(tokens) :]
