# SPDX-License-Identifier: Apache-2.0
"""Scores of prompt tokens equal a plain forward pass, whatever the chunking; they are bounded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.oracle import load_model
from tests.server.live import CHUNK, MAX_LEN, LiveServer, prompt

MAX_LOGPROBS = 20
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, MAX_LEN - 1)
TOLERANCE = 2e-4


@torch.inference_mode()
def forward_scores(model_dir: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[len(tokens) - 1, vocabulary]`; row i is about token i + 1."""
    logits: torch.Tensor = load_model(model_dir, torch.float32)(torch.tensor([tokens])).logits
    return logits[0, :-1].log_softmax(-1)


def score(server: LiveServer, tokens: Sequence[int], logprobs: int = 1) -> Any:
    """What an evaluation harness sends: the prompt back with its scores, and nothing new."""
    completion = server.complete(
        list(tokens),
        max_tokens=0,
        echo=True,
        logprobs=logprobs,
        return_tokens_as_token_ids=True,
    )
    return completion.choices[0].logprobs


def check_scores(model_dir: Path, tokens: Sequence[int], found: Any) -> None:
    expected = forward_scores(model_dir, tokens)
    assert found.tokens == [f"token_id:{token}" for token in tokens]
    assert found.token_logprobs[0] is None
    of_tokens = expected.gather(1, torch.tensor([tokens[1:]]).T)[:, 0]
    assert found.token_logprobs[1:] == pytest.approx(of_tokens.tolist(), abs=TOLERANCE)
    for row, top in zip(expected, found.top_logprobs[1:], strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=TOLERANCE)
        assert f"token_id:{int(row.argmax())}" in top


class TestEchoWithoutOutput:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_scores(self, server: LiveServer, tiny_llama_dir: Path, length: int) -> None:
        tokens = prompt(length)
        check_scores(tiny_llama_dir, tokens, score(server, tokens))

    def test_eight_at_once(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        prompts = [prompt(length, seed=1) for length in (*LENGTHS, 100)]
        with ThreadPoolExecutor(max_workers=8) as pool:
            found = list(pool.map(lambda tokens: score(server, tokens), prompts))
        for tokens, scores in zip(prompts, found, strict=True):
            check_scores(tiny_llama_dir, tokens, scores)

    def test_scores_do_not_depend_on_what_the_cache_holds(
        self, server: LiveServer, tiny_llama_dir: Path
    ) -> None:
        """A prefix hit skips the computation that scores need."""
        tokens = prompt(2 * CHUNK + 3, seed=2)
        server.tokens(tokens, max_tokens=1)
        check_scores(tiny_llama_dir, tokens, score(server, tokens))

    def test_a_prompt_as_long_as_the_context(self, server: LiveServer) -> None:
        with pytest.raises(openai.BadRequestError, match=f"context length is {MAX_LEN} tokens"):
            score(server, prompt(MAX_LEN))


class TestScoresOfOutput:
    def test_they_go_on_from_those_of_the_prompt(
        self, server: LiveServer, tiny_llama_dir: Path
    ) -> None:
        tokens = prompt(CHUNK + 1, seed=3)
        completion = server.complete(
            tokens,
            max_tokens=6,
            echo=True,
            logprobs=1,
            ignore_eos=True,
            return_tokens_as_token_ids=True,
        )
        found = completion.choices[0].logprobs
        assert found is not None
        assert found.tokens is not None
        both = [int(token.removeprefix("token_id:")) for token in found.tokens]
        assert both[: len(tokens)] == tokens
        assert len(both) == len(tokens) + 6
        check_scores(tiny_llama_dir, both, found)


class TestBounds:
    def test_the_most_that_is_allowed(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        tokens = prompt(MAX_LEN - 1, seed=4)
        prompts = [tokens, *(prompt(MAX_LEN - 1, seed) for seed in (5, 6, 7))]
        completion = server.complete(prompts, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
        for choice in completion.choices:
            rows = choice.model_dump()["prompt_logprobs"]
            assert len(rows) == MAX_LEN - 1
            assert all(MAX_LOGPROBS <= len(row) <= MAX_LOGPROBS + 1 for row in rows[1:])
        rows = completion.choices[0].model_dump()["prompt_logprobs"]
        expected = forward_scores(tiny_llama_dir, tokens).topk(MAX_LOGPROBS)
        for row, values in zip(rows[1:], expected.values, strict=True):
            top = sorted((entry["logprob"] for entry in row.values()), reverse=True)
            assert top[: MAX_LOGPROBS - 1] == pytest.approx(values[:-1].tolist(), abs=TOLERANCE)

    @pytest.mark.parametrize(
        "asked",
        [
            {"prompt_logprobs": MAX_LOGPROBS + 1},
            {"prompt_logprobs": -1},
            {"logprobs": 1024},
            {"logprobs": MAX_LOGPROBS + 1, "echo": True, "max_tokens": 0},
        ],
        ids=str,
    )
    def test_more_is_refused(self, server: LiveServer, asked: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError, match=f"max allowed: {MAX_LOGPROBS}"):
            server.complete(prompt(20), **asked)
