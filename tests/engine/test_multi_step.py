# SPDX-License-Identifier: Apache-2.0
"""Turns of several decode steps: what a client sees is what one step a turn gives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rbln_vllm.core.step import StepKind
from rbln_vllm.worker.multi_step_runner import MultiStepRunner
from tests.engine.engines import (
    MAX_LEN,
    add,
    check_idle,
    counted_preemptions,
    generate,
    greedy,
    prompt,
    recorded_steps,
    run_to_the_end,
    runner_of,
    running_engine,
    scheduler_of,
    tokens_of,
)
from tests.oracle import hf_greedy

STEPS = 4


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "in_turn"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(tiny_llama_dir, async_scheduling=request.param) as llm:
        assert scheduler_of(llm).multi_step.most_steps == STEPS, "the default on this device"
        yield llm


@pytest.fixture(scope="module")
def single(tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(tiny_llama_dir, additional_config={"max_decode_steps": 1}) as llm:
        yield llm


@pytest.fixture
def turns(llm: LLM) -> Iterator[list[int]]:
    """The decode steps of each turn that reaches the runner from now on."""
    runner = runner_of(llm)
    assert isinstance(runner, MultiStepRunner)
    seen: list[int] = []
    sample = runner.sample_tokens

    def counted(*args: Any) -> Any:
        seen.append(runner._steps)
        return sample(*args)

    with patch.object(runner, "sample_tokens", counted):
        yield seen


@pytest.mark.parametrize("new", [1, 2, STEPS, STEPS + 1, STEPS + 2, 2 * STEPS + 1])
def test_greedy_tokens_are_those_of_hugging_face(
    llm: LLM, turns: list[int], tiny_llama_dir: Path, new: int
) -> None:
    prompts = [prompt(31 + place) for place in range(3)]  # a block has 32 tokens
    expected = hf_greedy(tiny_llama_dir, prompts, new, ignore_eos=True)
    outputs = generate(llm, prompts, greedy(new))
    assert [tokens_of(output) for output in outputs] == [each.token_ids for each in expected]
    assert (max(turns) > 1) == (new > 2)


def test_seeds_and_parameters_of_programs(llm: LLM, single: LLM, turns: list[int]) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=21, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.7, seed=6, max_tokens=18),
        greedy(23),
    ]
    prompts = [prompt(9), prompt(40), prompt(64)]
    got, expected = (generate(engine, prompts, params) for engine in (llm, single))
    assert [tokens_of(o) for o in got] == [tokens_of(o) for o in expected]
    assert STEPS in turns


@pytest.mark.parametrize("at", range(1, 2 * STEPS + 2))
def test_a_stop_token_ends_a_request_at_once(llm: LLM, single: LLM, at: int) -> None:
    """At each place of a turn, alone and beside a row that goes on."""
    tokens = tokens_of(generate(single, [prompt(12)], greedy(20))[0])
    stop = next((t for t in tokens[at:] if t not in tokens[:at]), tokens[at])
    stops = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    end = tokens.index(stop) + 1
    (alone,) = generate(llm, [prompt(12)], stops)
    beside, other = generate(llm, [prompt(12), prompt(13)], [stops, greedy(30)])
    for output in (alone, beside):
        assert tokens_of(output) == tokens[:end]
        assert output.outputs[0].stop_reason == stop
    assert len(tokens_of(other)) == 30
    check_idle(llm)


def test_what_was_scheduled_ahead_of_an_end_is_not_computed(llm: LLM, single: LLM) -> None:
    tokens = tokens_of(generate(single, [prompt(12)], greedy(9))[0])
    stops = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tokens[-1:])
    with recorded_steps(llm) as steps:
        (output,) = generate(llm, [prompt(12)], stops)
    end = len(tokens_of(output))
    assert end <= 9
    ran = [step for step in steps if step.programs and step.plan.kind is StepKind.DECODE]
    assert len(ran) == end - 1


def test_a_name_may_be_used_again_at_once(llm: LLM, single: LLM) -> None:
    tokens = tokens_of(generate(single, [prompt(12)], greedy(9))[0])
    stops = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tokens[-1:])
    for _ in range(2):
        add(llm, "again", prompt(12), stops.clone())
        outputs = run_to_the_end(llm)
        assert tokens_of(outputs["again"]) == tokens[: len(tokens_of(outputs["again"]))]
        assert outputs["again"].outputs[0].finish_reason == "stop"


def test_the_end_of_the_context(llm: LLM, tiny_llama_dir: Path) -> None:
    prompts = [prompt(MAX_LEN - left) for left in (1, 2, STEPS, STEPS + 1, STEPS + 3)]
    expected = hf_greedy(tiny_llama_dir, prompts, STEPS + 3, ignore_eos=True)
    for tokens, each in zip(prompts, expected, strict=True):
        (output,) = generate(llm, [tokens], greedy(50))
        left = MAX_LEN - len(tokens)
        assert tokens_of(output) == each.token_ids[:left]
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2},
        {"presence_penalty": 1.5},
        {"min_tokens": 3},
        {"logit_bias": {5: 4.0}},
        {"structured_outputs": StructuredOutputsParams(regex="[a-c]{9}")},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_rows_that_need_more_take_one_step_a_turn(
    llm: LLM, single: LLM, turns: list[int], asked: dict[str, Any]
) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=9, **asked), greedy(9)]
    prompts = [prompt(10), prompt(11)]
    outputs = generate(llm, prompts, params)
    assert set(turns) == {1}
    expected = generate(single, prompts, [p.clone() for p in params])
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in expected]


def test_who_arrives_is_next(llm: LLM, turns: list[int]) -> None:
    """Turns that were scheduled before end; the next step is the newcomer's prompt."""
    actions = {4: partial(add, llm, "late", prompt(20), greedy(9))}
    add(llm, "early", prompt(9), greedy(60))
    outputs = run_to_the_end(llm, actions)
    assert {len(tokens_of(output)) for output in outputs.values()} == {9, 60}
    assert turns.count(STEPS) > 5
    check_idle(llm)


@pytest.mark.parametrize("at", range(1, 7))
def test_an_abort_at_any_step_leaves_the_pool_as_it_was(llm: LLM, at: int) -> None:
    for name in ("a", "b"):
        add(llm, name, prompt(30), greedy(24))
    abort = partial(llm.llm_engine.abort_request, ["a"])
    outputs = run_to_the_end(llm, {at: abort})
    assert len(tokens_of(outputs["b"])) == 24
    check_idle(llm)


def test_a_tight_pool(tiny_llama_dir: Path) -> None:
    """Preempted requests go on where they were; turns never ask for what is not free."""
    prompts = [prompt(40 + place) for place in range(4)]
    expected = hf_greedy(tiny_llama_dir, prompts, 50, ignore_eos=True)
    with running_engine(
        tiny_llama_dir, block_size=8, max_model_len=128, num_gpu_blocks_override=34
    ) as llm:
        for place, tokens in enumerate(prompts):
            add(llm, str(place), tokens, greedy(50))
        with counted_preemptions(llm):
            outputs = run_to_the_end(llm)
        assert [tokens_of(outputs[str(place)]) for place in range(4)] == [
            each.token_ids for each in expected
        ]
        check_idle(llm)


def test_by_vllms_sampler(tiny_llama_dir: Path) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=21, ignore_eos=True),
        greedy(14),
    ]
    prompts = [prompt(9), prompt(40)]
    tokens = []
    for steps in (1, STEPS):
        options = {"use_custom_sampler": False, "max_decode_steps": steps}
        with running_engine(tiny_llama_dir, additional_config=options) as llm:
            tokens.append([tokens_of(o) for o in generate(llm, prompts, params)])
    assert tokens[0] == tokens[1]


def test_not_beside_who_looks_at_every_token(tiny_llama_dir: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with running_engine(tiny_llama_dir, speculative_config=drafts) as llm:
        assert scheduler_of(llm).multi_step.most_steps == 1
