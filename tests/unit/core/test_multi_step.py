# SPDX-License-Identifier: Apache-2.0
"""How many decode steps a turn has, and that schedulers count them right."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from rbln_vllm.core import multi_step_scheduler
from rbln_vllm.core.multi_step import MOST_TOKENS, MultiStepPolicy, is_plain
from rbln_vllm.core.scheduler import RBLNAsyncScheduler, RBLNScheduler
from tests.unit.core.harness import Driver, SchedulerFactory, make_request, prompt_of

BLOCK, MAX_LEN = 8, 64
POLICY = MultiStepPolicy(most_steps=4, max_model_len=MAX_LEN, step_tokens=256)
SCHEDULERS = (RBLNScheduler, RBLNAsyncScheduler)


def rows(count: int, **options: Any) -> list[Any]:
    return [make_request(f"r{i}", prompt_of(5), block=BLOCK, **options) for i in range(count)]


@pytest.mark.usefixtures("build")  # with it block hashes have a root
class TestPolicy:
    @pytest.mark.parametrize(
        ("count", "steps"), [(0, 1), (1, 4), (8, 4), (9, 3), (10, 3), (11, 2), (16, 2), (17, 1)]
    )
    def test_many_rows_take_fewer_steps(self, count: int, steps: int) -> None:
        requests = rows(count, max_tokens=50)
        assert POLICY.steps(requests, free_blocks=count, block_size=BLOCK) == steps
        assert steps * count <= MOST_TOKENS

    @pytest.mark.parametrize(("left", "steps"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
    def test_no_row_goes_beyond_its_last_token(self, left: int, steps: int) -> None:
        requests = rows(2, max_tokens=20)
        requests[1].max_tokens = left
        assert POLICY.steps(requests, 2, BLOCK) == steps

    @pytest.mark.parametrize(("length", "steps"), [(60, 4), (61, 3), (63, 1)])
    def test_no_row_goes_beyond_the_context(self, length: int, steps: int) -> None:
        request = make_request("r", prompt_of(length), block=BLOCK, max_tokens=50)
        assert POLICY.steps([request], 1, BLOCK) == steps

    def test_tokens_under_way_count(self) -> None:
        (request,) = rows(1, max_tokens=7)
        request.num_output_placeholders = 4
        assert POLICY.steps([request], 1, BLOCK) == 3

    def test_a_pool_without_a_block_for_each_row(self) -> None:
        assert POLICY.steps(rows(3, max_tokens=9), free_blocks=2, block_size=BLOCK) == 1

    def test_a_turn_fits_one_block(self) -> None:
        assert POLICY.steps(rows(1, max_tokens=9), 5, block_size=2) == 2

    def test_a_turn_fits_what_upstream_schedules(self) -> None:
        policy = MultiStepPolicy(4, MAX_LEN, step_tokens=7)
        assert policy.steps(rows(2, max_tokens=9), 5, BLOCK) == 3

    def test_one_row_that_needs_more_than_programs(self) -> None:
        penalised = SamplingParams(max_tokens=9, presence_penalty=0.5)
        both = [*rows(1, max_tokens=9), *rows(1, params=penalised)]
        assert POLICY.steps(both, 5, BLOCK) == 1

    def test_no_steps_at_all(self) -> None:
        with pytest.raises(ValueError, match="one decode step or more"):
            MultiStepPolicy(0, MAX_LEN, 256)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3},
        {"stop_token_ids": [3]},
        {"ignore_eos": True},
        {"prompt_logprobs": 1},
    ],
)
def test_plain(asked: dict[str, Any]) -> None:
    assert is_plain(SamplingParams(**asked))


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
        {"thinking_token_budget": 0},
        {"extra_args": {"mine": 1}},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
)
def test_not_plain(asked: dict[str, Any]) -> None:
    assert not is_plain(SamplingParams(**asked))


def test_bad_words_are_not_plain() -> None:
    params = SamplingParams(bad_words=["no"])
    assert not is_plain(params)


def test_one_step_where_an_installed_processor_sees_every_token(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(steps=4).multi_step.most_steps == 4
    monkeypatch.setattr(multi_step_scheduler, "entry_points", lambda group: (group,))
    assert build(steps=4).multi_step.most_steps == 1


class TestTables:
    def test_alone(self, build: SchedulerFactory) -> None:
        """Nine tokens: one from the prompt's chunk, then turns of four."""
        driver = Driver(build(steps=4, block=BLOCK))
        driver.add("a", prompt_of(5), max_tokens=10)
        driver.run()
        assert [row.split(" free")[0] for row in driver.table if row[0] != "-"] == [
            "P a[0:5]",
            "D4 a",
            "D4 a",
            "D a",
        ]
        driver.check_text()

    def test_nobody_waits_for_a_turn_that_begins_after_it_came(
        self, build: SchedulerFactory
    ) -> None:
        driver = Driver(build(steps=4, block=BLOCK, chunk=8, max_prefill_run=1))
        driver.add("a", prompt_of(5), max_tokens=30)
        driver.step()
        assert driver.step().tokens == (4,)
        driver.add("b", prompt_of(20, 1), max_tokens=9)
        while len(driver.plans) < 8:
            plan = driver.step()
            assert plan.kind.value == "prefill" or "b" in plan.request_ids or plan.tokens == (1,)
        driver.run()
        driver.check_text()

    def test_no_statistics_of_drafts(self, build: SchedulerFactory) -> None:
        scheduler = build(steps=4, block=BLOCK, log_stats=True)
        driver = Driver(scheduler)
        driver.add("a", prompt_of(5), max_tokens=10)
        driver.run()
        assert scheduler.make_stats().spec_decoding_stats is None

    @pytest.mark.parametrize("cls", SCHEDULERS)
    @pytest.mark.parametrize("steps", [1, 2, 4, 7])
    @pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 8, 9])
    def test_every_length(
        self, build: SchedulerFactory, cls: type[RBLNScheduler], steps: int, max_tokens: int
    ) -> None:
        driver = Driver(build(steps=steps, block=4, cls=cls), depth=2, may_idle=True)
        for i in range(3):
            driver.add(f"r{i}", prompt_of(3 + 4 * i), max_tokens=max_tokens + i)
        driver.run()
        driver.check_text()

    @pytest.mark.parametrize("cls", SCHEDULERS)
    @pytest.mark.parametrize("at", range(12))
    def test_an_abort_at_any_step_leaves_the_pool_as_it_was(
        self, build: SchedulerFactory, cls: type[RBLNScheduler], at: int
    ) -> None:
        driver = Driver(build(steps=4, block=4, cls=cls), depth=2, may_idle=True)
        for i in range(3):
            driver.add(f"r{i}", prompt_of(5 + i), max_tokens=14)
        for step in range(12):
            alive = "r1" in driver.scheduler.requests
            driver.step(abort_in_flight=["r1"] if step == at and alive else [])
        driver.run()
        driver.check_text("r0", "r2")

    def test_a_request_that_ends_ahead_takes_no_further_row(self, build: SchedulerFactory) -> None:
        """Its last tokens are under way, so the step after is not given to it."""
        driver = Driver(build(steps=4, block=4, cls=RBLNAsyncScheduler), depth=2, may_idle=True)
        driver.add("a", prompt_of(5), max_tokens=5)
        driver.add("b", prompt_of(6), max_tokens=40)
        driver.run()
        rows_of_a = sum(
            plan.tokens[plan.request_ids.index("a")]
            for plan in driver.plans
            if "a" in plan.request_ids and plan.kind.value == "decode"
        )
        assert rows_of_a == 4
        driver.check_text()
