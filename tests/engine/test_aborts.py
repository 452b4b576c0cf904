# SPDX-License-Identifier: Apache-2.0
"""A request may be aborted at any step: only it ends, and every block comes back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.engine.engines import (
    BLOCK,
    CHUNK,
    add,
    check_idle,
    counted_preemptions,
    greedy,
    prompt,
    recorded_steps,
    run_to_the_end,
    running_engine,
    scheduler_of,
    tokens_of,
)
from tests.oracle import hf_greedy

# Three chunks, one chunk that fills its blocks, and one that waits for a row.
LENGTHS = {"long": 2 * CHUNK + 9, "full": BLOCK, "waits": CHUNK + 1}
NEW = 6


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    """Two rows for three requests."""
    with running_engine(
        tiny_llama_dir, max_num_seqs=2, enable_prefix_caching=request.param
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> dict[str, list[int]]:
    prompts = [prompt(length) for length in LENGTHS.values()]
    results = hf_greedy(tiny_llama_dir, prompts, NEW, ignore_eos=True)
    return {name: item.token_ids for name, item in zip(LENGTHS, results, strict=True)}


def run(llm: LLM, abort_at: dict[int, list[str]]) -> dict[str, RequestOutput]:
    """All three requests; `abort_at` names those that end before a step, by its number."""
    for name, length in LENGTHS.items():
        add(llm, name, prompt(length), greedy(NEW))

    def abort(names: list[str]) -> None:
        llm.llm_engine.abort_request(names)
        known = {request_id.rpartition("-")[0] for request_id in scheduler_of(llm).requests}
        assert not known & set(names)

    return run_to_the_end(llm, {step: partial(abort, names) for step, names in abort_at.items()})


@pytest.fixture(scope="module")
def num_steps(llm: LLM) -> int:
    with recorded_steps(llm) as steps:
        run(llm, {})
    assert len(steps) > 10
    return len(steps)


@pytest.mark.parametrize("victims", [["long"], ["full"], ["waits"], ["full", "long"]], ids=str)
def test_abort_at_every_step(
    llm: LLM, num_steps: int, expected: dict[str, list[int]], victims: list[str]
) -> None:
    for step in range(num_steps + 1):
        outputs = run(llm, {step: victims})
        for name in set(LENGTHS) - set(victims):
            assert tokens_of(outputs[name]) == expected[name], f"{name}, abort before {step}"
        for name in set(victims) & set(outputs):
            given = tokens_of(outputs[name])
            assert given == expected[name][: len(given)]
        check_idle(llm)


def test_abort_of_everything_at_every_step(llm: LLM, num_steps: int) -> None:
    for step in range(num_steps + 1):
        run(llm, {step: list(LENGTHS)})
        check_idle(llm)


def test_two_end_and_one_arrives_in_the_same_step(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    """Rows move when others leave; each keeps its own sampling parameters."""
    prompts = {str(i): prompt(9 + i, seed=21) for i in range(6)}
    stop = 500  # a token that no request may choose before its tenth
    params = {
        name: greedy(12, min_tokens=index, stop_token_ids=[stop], presence_penalty=index / 4)
        for index, name in enumerate(prompts)
    }
    alone: dict[str, RequestOutput] = {}
    for name, tokens in prompts.items():
        add(tiny_llm, name, tokens, params[name])
        alone |= run_to_the_end(tiny_llm)
    for step in range(4, 16):
        for name in "0123":
            add(tiny_llm, name, prompts[name], params[name])

        def change() -> None:
            tiny_llm.llm_engine.abort_request(["0", "2"])
            for name in "45":
                add(tiny_llm, name, prompts[name], params[name])

        together = run_to_the_end(tiny_llm, {step: change})
        for name in "1345":
            assert tokens_of(together[name]) == tokens_of(alone[name])
        check_idle(tiny_llm)


def test_children_of_one_request(llm: LLM, num_steps: int) -> None:
    """`n` completions of one prompt leave nothing behind, whenever they are aborted.

    By the engine's id, as the server does; by another id vLLM forgets the parent's record.
    """
    params = SamplingParams(n=3, seed=1, max_tokens=NEW, ignore_eos=True)
    for step in range(num_steps):
        family = add(llm, "family", prompt(CHUNK + 1), params)
        end = partial(llm.llm_engine.abort_request, [family], internal=True)
        run_to_the_end(llm, {step: end})
        check_idle(llm)


def test_abort_under_pressure(tiny_llama_dir: Path) -> None:
    """Also of requests that were preempted and wait to be resumed."""
    prompts = [prompt(20, seed) for seed in range(8)]
    expected = [x.token_ids for x in hf_greedy(tiny_llama_dir, prompts, 40, ignore_eos=True)]
    sizes = {"block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}
    with running_engine(tiny_llama_dir, max_num_seqs=8, num_gpu_blocks_override=31, **sizes) as llm:
        for step in range(10, 90, 8):
            for index, tokens in enumerate(prompts):
                add(llm, str(index), tokens, greedy(40))
            with counted_preemptions(llm):
                outputs = run_to_the_end(
                    llm, {step: lambda: llm.llm_engine.abort_request(["1", "5", "7"])}
                )
            for index in (0, 2, 3, 4, 6):
                assert tokens_of(outputs[str(index)]) == expected[index]
            check_idle(llm)
