# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode never share a step; arrivals, preemption and priority change no token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams

from rbln_vllm.core.step import StepKind
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    add,
    all_tokens,
    check_idle,
    counted_preemptions,
    environment,
    generate,
    greedy,
    prompt,
    recorded_steps,
    run_to_the_end,
    running_engine,
    scheduler_of,
    tokens_of,
)
from tests.oracle import hf_greedy

# 8 sequences that grow to 60 tokens need 64 blocks of 8; the pools below have 16 to 30.
PRESSED = {"max_num_seqs": 8, "block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def pressed_llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(
        tiny_llama_dir,
        num_gpu_blocks_override=31,
        enable_prefix_caching=request.param,
        **PRESSED,
    ) as llm:
        yield llm


def expected_tokens(model_dir: Path, prompts: list[list[int]], number: int) -> list[list[int]]:
    return [item.token_ids for item in hf_greedy(model_dir, prompts, number, ignore_eos=True)]


class TestSteps:
    def test_arrivals_during_decode(self, tiny_llm: LLM, tiny_llama_dir: Path) -> None:
        """A prompt of several chunks arrives every few steps, while others decode."""
        lengths = (5, 130, CHUNK, 2 * CHUNK + 1, 1, 200, BLOCK, 70)
        prompts = [prompt(length, seed=11) for length in lengths]

        def arrival(index: int) -> None:
            add(tiny_llm, str(index), prompts[index], greedy(15))

        arrivals = {3 * i: lambda i=i: arrival(i) for i in range(len(prompts))}
        with recorded_steps(tiny_llm) as steps:
            outputs = run_to_the_end(tiny_llm, arrivals)
        got = [tokens_of(outputs[str(index)]) for index in range(len(prompts))]
        assert got == expected_tokens(tiny_llama_dir, prompts, 15)
        kinds = [step.plan.kind for step in steps]  # classifying checked that none is mixed
        assert kinds.count(StepKind.PREFILL) == 1 + 3 + 1 + 2 + 4 + 1 + 2
        check_idle(tiny_llm)

    def test_prefills_in_a_row_are_bounded(self, tiny_llm: LLM) -> None:
        """At most one (the CPU's default) while a decode waits."""
        scheduler = scheduler_of(tiny_llm)
        assert scheduler.turns.max_prefill_run == 1
        late = {5: lambda: [add(tiny_llm, str(i), prompt(200, i), greedy(2)) for i in range(3)]}
        add(tiny_llm, "decoding", prompt(3), greedy(40))
        with recorded_steps(tiny_llm) as steps:
            run_to_the_end(tiny_llm, late)
        kinds = [step.plan.kind is StepKind.PREFILL for step in steps]
        assert longest_run(kinds) == 1
        assert sum(kinds) >= 3 * 4

    @pytest.mark.parametrize(
        ("options", "device", "bound"),
        [
            ({"max_prefill_run": 0}, None, 0),
            ({"max_prefill_run": 5}, None, 5),
            ({}, "RBLN-CR03", 0),
        ],
        ids=str,
    )
    def test_the_bound_can_be_set(
        self, tiny_llama_dir: Path, options: dict[str, int], device: str | None, bound: int
    ) -> None:
        arguments = {"block_size": 512} if device else {}
        with (
            environment(RBLN_FORCE_NPU_NAME=device),
            running_engine(tiny_llama_dir, additional_config=options, **arguments) as llm,
        ):
            assert scheduler_of(llm).turns.max_prefill_run == bound

    def test_a_shorter_chunk_for_long_prompts(self, tiny_llama_dir: Path) -> None:
        """`long_prefill_token_threshold` is the chunk of the whole engine, or steps would mix."""
        prompts = [prompt(length, seed=12) for length in (40, 48, 49, 150)]
        with (
            running_engine(tiny_llama_dir, long_prefill_token_threshold=48) as llm,
            recorded_steps(llm) as steps,
        ):
            outputs = generate(llm, prompts, greedy(10))
        assert all_tokens(outputs) == expected_tokens(tiny_llama_dir, prompts, 10)
        prefills = [step for step in steps if step.plan.kind is StepKind.PREFILL]
        assert {step.forward for step in prefills} == {"prefill_b1_q48"}


def longest_run(flags: list[bool]) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


class TestExactBlocks:
    """A prompt that fills its blocks gets its next block on the very first decode step."""

    @pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, CHUNK + BLOCK])
    def test_arriving_while_others_decode(
        self, tiny_llm: LLM, tiny_llama_dir: Path, length: int
    ) -> None:
        prompts = [prompt(length, seed) for seed in range(16)]
        arrivals = {
            2 * i: partial(add, tiny_llm, str(i), tokens, greedy(12))
            for i, tokens in enumerate(prompts)
        }
        outputs = run_to_the_end(tiny_llm, arrivals)
        got = [tokens_of(outputs[str(index)]) for index in range(16)]
        assert got == expected_tokens(tiny_llama_dir, prompts, 12)

    def test_all_at_once(self, tiny_llm: LLM, tiny_llama_dir: Path) -> None:
        prompts = [prompt(BLOCK, seed) for seed in range(16)]
        outputs = generate(tiny_llm, prompts, greedy(12))
        assert all_tokens(outputs) == expected_tokens(tiny_llama_dir, prompts, 12)

    def test_with_preemption(self, pressed_llm: LLM, tiny_llama_dir: Path) -> None:
        """The block granted last is lost again."""
        prompts = [prompt(32, seed) for seed in range(16)]
        with counted_preemptions(pressed_llm):
            outputs = generate(pressed_llm, prompts, greedy(28))
        assert all_tokens(outputs) == expected_tokens(tiny_llama_dir, prompts, 28)
        check_idle(pressed_llm)


class TestPressure:
    def test_resumed_requests_keep_their_tokens(
        self, pressed_llm: LLM, tiny_llama_dir: Path
    ) -> None:
        """Resumed requests are prefilled with what they had generated, not classed by it."""
        prompts = [prompt(length, seed=13) for length in (1, 7, 8, 9, 16, 17, 31, 32, 33, 65) * 2]
        with counted_preemptions(pressed_llm) as preempted, recorded_steps(pressed_llm):
            outputs = generate(pressed_llm, prompts, greedy(45))
        assert len(preempted) >= 8
        assert all_tokens(outputs) == expected_tokens(tiny_llama_dir, prompts, 45)
        check_idle(pressed_llm)

    def test_sampled_requests_draw_what_they_would_have(
        self, pressed_llm: LLM, tiny_llama_dir: Path
    ) -> None:
        params = [SamplingParams(seed=i, max_tokens=45, ignore_eos=True) for i in range(12)]
        prompts = [prompt(9 + i, seed=14) for i in range(12)]
        with counted_preemptions(pressed_llm):
            pressed = generate(pressed_llm, prompts, params)
        with running_engine(tiny_llama_dir, **PRESSED) as roomy:
            assert all_tokens(pressed) == all_tokens(generate(roomy, prompts, params))

    def test_one_request_takes_the_whole_pool(self, pressed_llm: LLM, tiny_llama_dir: Path) -> None:
        """Alone and beside others the longest sequence reaches its end."""
        prompts = [prompt(100, seed=15), prompt(20, seed=15), prompt(90, seed=15)]
        outputs = generate(pressed_llm, prompts, [greedy(28), greedy(60), greedy(38)])
        for tokens, output in zip(prompts, outputs, strict=True):
            (want,) = expected_tokens(tiny_llama_dir, [tokens], len(tokens_of(output)))
            assert tokens_of(output) == want
        assert [len(tokens_of(output)) for output in outputs] == [28, 60, 38]


class TestPriority:
    @pytest.fixture(scope="class")
    def priority_llm(self, tiny_llama_dir: Path) -> Iterator[LLM]:
        with running_engine(
            tiny_llama_dir, scheduling_policy="priority", num_gpu_blocks_override=31, **PRESSED
        ) as llm:
            yield llm

    def test_lower_values_go_first(self, priority_llm: LLM) -> None:
        """With more requests than rows, rows go to the most urgent, whenever they came."""
        for index in range(24):
            add(priority_llm, str(index), prompt(5, index), greedy(6), priority=24 - index)
        with recorded_steps(priority_llm) as steps:
            run_to_the_end(priority_llm)
        prefills = [s.plan.request_ids[0] for s in steps if s.plan.kind is StepKind.PREFILL]
        order = [int(request_id.split("-")[0]) for request_id in prefills]
        assert order == list(range(23, -1, -1))

    def test_the_least_urgent_is_preempted(self, priority_llm: LLM, tiny_llama_dir: Path) -> None:
        prompts = [prompt(20, seed) for seed in range(8)]
        for index, tokens in enumerate(prompts):
            add(priority_llm, str(index), tokens, greedy(40), priority=index)
        with counted_preemptions(priority_llm) as preempted:
            outputs = run_to_the_end(priority_llm)
        assert not any(request_id.startswith("0-") for request_id in preempted)
        got = [tokens_of(outputs[str(index)]) for index in range(8)]
        assert got == expected_tokens(tiny_llama_dir, prompts, 40)
        check_idle(priority_llm)
