# SPDX-License-Identifier: Apache-2.0
"""A real model: SmolLM2-135M answers 20 prompts as Hugging Face does, alone and 8 at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm import LLM

from tests.engine.bf16_rule import check_bf16
from tests.engine.engines import all_tokens, generate, greedy, report, running_engine
from tests.oracle import Greedy, hf_greedy

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
NEW = 16
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:",
    "Water boils at",
    "The three laws of thermodynamics are",
    "In 1969, humans first",
    "A recipe for bread: take 500 g of flour,",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The opposite of cold is",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "Q: What is 12 times 12?\nA:",
    "The quick brown fox",
    "Les nombres en français: un, deux,",
    "To be, or not to be,",
    "The moon orbits the earth because",
    "x",
    "Monday, Tuesday, Wednesday,",
    "Shakespeare wrote many plays. " * 12 + "The best known is",
)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    tokens = [tokenizer(text).input_ids for text in TEXTS]
    assert max(map(len, tokens)) > SIZES["max_num_batched_tokens"]  # one needs two chunks
    return tokens


@pytest.fixture(scope="module")
def truth(smollm2_dir: Path, prompts: list[list[int]]) -> list[Greedy]:
    return hf_greedy(smollm2_dir, prompts, NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def fp32_llm(smollm2_dir: Path) -> Iterator[LLM]:
    with running_engine(smollm2_dir, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def bf16_llm(smollm2_dir: Path) -> Iterator[LLM]:
    with running_engine(smollm2_dir, dtype="bfloat16", **SIZES) as llm:
        yield llm


def test_fp32_eight_at_a_time(fp32_llm: LLM, prompts: list[list[int]], truth: list[Greedy]) -> None:
    outputs = generate(fp32_llm, prompts, greedy(NEW))
    assert all_tokens(outputs) == [item.token_ids for item in truth]
    assert report(fp32_llm)["compiled_after_ready"] == 0


def test_fp32_alone(fp32_llm: LLM, prompts: list[list[int]], truth: list[Greedy]) -> None:
    for tokens, want in zip(prompts, truth, strict=True):
        (output,) = generate(fp32_llm, [tokens], greedy(12))
        assert all_tokens([output]) == [want.token_ids[:12]]


def test_bf16_eight_at_a_time(
    bf16_llm: LLM, smollm2_dir: Path, prompts: list[list[int]], truth: list[Greedy]
) -> None:
    outputs = generate(bf16_llm, prompts, greedy(NEW, logprobs=1))
    assert check_bf16(smollm2_dir, outputs, truth) > 0.5


def test_bf16_alone(
    bf16_llm: LLM, smollm2_dir: Path, prompts: list[list[int]], truth: list[Greedy]
) -> None:
    outputs = [generate(bf16_llm, [tokens], greedy(12, logprobs=1))[0] for tokens in prompts[:8]]
    assert check_bf16(smollm2_dir, outputs, truth[:8]) > 0.5
