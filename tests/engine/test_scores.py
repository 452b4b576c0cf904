# SPDX-License-Identifier: Apache-2.0
"""Scores of prompts and of generated tokens equal a plain forward pass, however chunked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm import LLM, RequestOutput
from vllm.exceptions import VLLMValidationError

from rbln_vllm.programs import SCORING_ROWS
from tests.engine.engines import (
    CHUNK,
    generate,
    greedy,
    prompt,
    recorded_steps,
    report,
    running_engine,
    tokens_of,
)
from tests.oracle import load_model

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 200)
WIDE_CHUNK = SCORING_ROWS + 32


@torch.inference_mode()
def plain_scores(model_dir: Path, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities `[n, vocabulary]` after each of `n` tokens, of one forward pass."""
    logits = load_model(model_dir, torch.float32)(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check_scores(model_dir: Path, output: RequestOutput) -> None:
    """Every score that the output gives, of the prompt and after it."""
    before, after = list(output.prompt_token_ids or ()), tokens_of(output)
    expected = plain_scores(model_dir, [*before, *after])
    places = output.prompt_logprobs
    assert places is not None
    assert places[0] is None
    assert len(places) == len(before)
    given = [*places[1:], *(output.outputs[0].logprobs or ())]
    assert len(given) == len(before) + len(after) - 1
    for position, (token, scores) in enumerate(zip([*before, *after][1:], given, strict=True)):
        assert scores is not None
        assert token in scores
        ours = torch.tensor([score.logprob for score in scores.values()])
        theirs = expected[position, list(scores)]
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-3, msg=f"{position}")
        best = [t for t, score in scores.items() if score.rank == 1]
        assert best == [int(expected[position].argmax())]


@pytest.fixture(scope="module")
def wide_llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    """A chunk of more rows than the widest logits program has."""
    with running_engine(
        tiny_llama_dir, max_num_batched_tokens=WIDE_CHUNK, max_num_seqs=2, max_logprobs=-1
    ) as llm:
        yield llm


def test_prompt_scores_together(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    prompts = [prompt(length, seed=6) for length in LENGTHS]
    outputs = generate(tiny_llm, prompts, greedy(4, prompt_logprobs=3, logprobs=3))
    for output in outputs:
        check_scores(tiny_llama_dir, output)


@pytest.mark.parametrize("length", [SCORING_ROWS, WIDE_CHUNK, WIDE_CHUNK + 1, 2 * WIDE_CHUNK])
def test_prompt_scores_wider_than_a_program(
    wide_llm: LLM, tiny_llama_dir: Path, length: int
) -> None:
    with recorded_steps(wide_llm) as steps:
        (output,) = generate(
            wide_llm, [prompt(length, seed=7)], greedy(1, prompt_logprobs=1, logprobs=1)
        )
    ran = [name for step in steps for name in step.programs]
    assert ran.count(f"logits_b{SCORING_ROWS}_q1") >= 1
    check_scores(tiny_llama_dir, output)
    assert report(wide_llm)["compiled_after_ready"] == 0


def test_all_scores_of_the_vocabulary(wide_llm: LLM, tiny_llama_dir: Path) -> None:
    """`-1` asks for every token's score; the server's `--max-logprobs -1` allows it."""
    (output,) = generate(wide_llm, [prompt(70, seed=8)], greedy(2, prompt_logprobs=-1, logprobs=-1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[5] is not None
    assert len(output.prompt_logprobs[5]) == 512
    check_scores(tiny_llama_dir, output)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("number", [21, 1024, -1])
def test_more_scores_than_the_published_maximum(tiny_llm: LLM, field: str, number: int) -> None:
    """The maximum is `--max-logprobs`, 20 unless set; the engine goes on."""
    with pytest.raises(VLLMValidationError, match=r"greater than max allowed: 20"):
        generate(tiny_llm, [prompt(3)], greedy(1, **{field: number}))
    (output,) = generate(tiny_llm, [prompt(3)], greedy(1, **{field: 20}))
    assert len(tokens_of(output)) == 1


def test_scored_prompts_skip_the_prefix_cache(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    """A hit would leave the scores of the tokens it covers unknown."""
    tokens = prompt(2 * CHUNK, seed=9)
    generate(tiny_llm, [tokens], greedy(1))
    (output,) = generate(tiny_llm, [tokens], greedy(1, prompt_logprobs=1, logprobs=1))
    check_scores(tiny_llama_dir, output)
