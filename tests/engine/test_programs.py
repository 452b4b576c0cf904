# SPDX-License-Identifier: Apache-2.0
"""Traffic reaches no shape outside the program table, and padding is never read or written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from rbln_vllm.core.step import StepKind
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    Step,
    all_tokens,
    generate,
    greedy,
    kv_pools,
    prompt,
    recorded_steps,
    report,
    runner_of,
    running_engine,
)
from tests.oracle import hf_greedy

MOST = 6
BUCKETS = (1, 3, 6)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    """Six sequences in decode buckets of 1, 3 and 6, no prefix cache."""
    with running_engine(tiny_llama_dir, max_num_seqs=MOST, enable_prefix_caching=False) as engine:
        assert runner_of(engine)._geometry.decode_buckets == BUCKETS
        yield engine


def smallest_bucket(rows: int) -> int:
    return min(bucket for bucket in BUCKETS if bucket >= rows)


def check_choice(step: Step) -> None:
    """A step ran the smallest program that holds it."""
    rows = len(step.plan.request_ids)
    if step.plan.kind is StepKind.PREFILL:
        assert step.forward == f"prefill_b1_q{CHUNK}"
    else:
        assert step.forward == f"decode_b{smallest_bucket(rows)}_q1"


def test_every_batch_size_runs_its_smallest_bucket(llm: LLM) -> None:
    """Six requests that end one after the other walk all batch sizes."""
    # The first must still run when the last joins: prefills and decode steps take turns.
    params = [greedy(2 + MOST + 3 * index) for index in range(MOST)]
    with recorded_steps(llm) as steps:
        generate(llm, [prompt(5, seed) for seed in range(MOST)], params)
    decodes = [step for step in steps if step.plan.kind is StepKind.DECODE]
    assert {len(step.plan.request_ids) for step in decodes} == set(range(1, MOST + 1))
    for step in steps:
        check_choice(step)
    for step in decodes:
        rows = smallest_bucket(len(step.plan.request_ids))
        assert step.programs == [f"decode_b{rows}_q1", f"logits_b{rows}_q1"]
    assert report(llm)["compiled_after_ready"] == 0


def test_every_chunk_remainder_runs_what_was_compiled(llm: LLM) -> None:
    """Prompts of C+1 to 2C tokens: one whole chunk, then each remainder once.

    A remainder of one token is a decode step.
    """
    lengths = range(CHUNK + 1, 2 * CHUNK + 1)
    with recorded_steps(llm) as steps:
        generate(llm, [prompt(length) for length in lengths], greedy(1))
    for step in steps:
        check_choice(step)
    prefills = [step.plan.tokens[0] for step in steps if step.plan.kind is StepKind.PREFILL]
    assert sorted(prefills) == sorted([*[CHUNK] * CHUNK, *range(2, CHUNK + 1)])
    counters = report(llm)
    assert counters["compiled_after_ready"] == 0
    assert counters["total"] == len(runner_of(llm)._geometry.table.programs) == 17


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 1},
    "top-k top-p": {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "seed": 2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias and bans": {"logit_bias": {9: 4.0}, "allowed_token_ids": [7, 8, 9]},
    "scores": {"logprobs": 5, "prompt_logprobs": 3},
}


def test_every_sampler_mix_runs_what_was_compiled(llm: LLM) -> None:
    names = list(SAMPLERS)
    mixes = [[*names[first:], *names[:first]][:rows] for first in range(6) for rows in (1, 2, 5)]
    for mix in mixes:
        params = [SamplingParams(max_tokens=3, ignore_eos=True, **SAMPLERS[n]) for n in mix]
        outputs = generate(llm, [prompt(9, seed) for seed in range(len(mix))], params)
        assert [len(tokens) for tokens in all_tokens(outputs)] == [3] * len(mix)
    assert report(llm)["compiled_after_ready"] == 0


@pytest.fixture
def poisoned_block(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Block 0, which padding rows name, is NaN in every layer."""
    blocks = [pool[0] for pool in kv_pools(llm)]
    assert len(blocks) == 2
    for block in blocks:
        block.fill_(torch.nan)
    yield blocks
    for block in blocks:
        block.zero_()


def test_padding_is_neither_read_nor_written(
    llm: LLM, tiny_llama_dir: Path, poisoned_block: list[torch.Tensor]
) -> None:
    """Two and five rows in buckets of three and six; chunks with every kind of remainder."""
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1)
    for prompts in ([prompt(n) for n in lengths], [prompt(n, 1) for n in (CHUNK + 1, 130)]):
        with recorded_steps(llm) as steps:
            outputs = generate(llm, prompts, greedy(20, logprobs=1))
        assert any(len(step.plan.request_ids) in (2, 5) for step in steps)
        expected = hf_greedy(tiny_llama_dir, prompts, 20, ignore_eos=True)
        assert all_tokens(outputs) == [item.token_ids for item in expected]
    for block in poisoned_block:
        assert block.isnan().all()


def test_stale_kv_of_finished_requests_is_not_read(llm: LLM, tiny_llama_dir: Path) -> None:
    """Whatever free blocks hold, a new request sees only what it wrote."""
    for pool in kv_pools(llm):
        pool[1:].fill_(torch.nan)
    prompts = [prompt(n, 2) for n in (3, BLOCK, CHUNK + 1, MAX_LEN - 21)]
    outputs = generate(llm, prompts, greedy(20))
    expected = hf_greedy(tiny_llama_dir, prompts, 20, ignore_eos=True)
    assert all_tokens(outputs) == [item.token_ids for item in expected]
