# SPDX-License-Identifier: Apache-2.0
"""The test models and the oracle are worth comparing with: their text varies and is repeatable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests import models
from tests.oracle import hf_choice_gaps, hf_greedy

PROMPTS = ["You may reproduce", "1, 2, 3 and", "x"]


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_greedy_text_varies_and_is_clear(
    tiny_model_dir: Callable[..., Path], architecture: str
) -> None:
    directory = tiny_model_dir(architecture)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    results = hf_greedy(directory, prompts, max_tokens=40)
    for result in results:
        assert len(result.token_ids) == 40
        assert len(set(result.token_ids)) >= 12
        assert tokenizer.decode(result.token_ids).isascii()
        assert min(result.gaps) > 1e-3
    assert len({tuple(result.token_ids[:8]) for result in results}) == len(PROMPTS)


def test_choice_gaps_are_zero_only_for_the_greedy_choice(tiny_llama_dir: Path) -> None:
    prompt = [40, 50, 60]
    (greedy,) = hf_greedy(tiny_llama_dir, [prompt], max_tokens=5)
    assert hf_choice_gaps(tiny_llama_dir, prompt, greedy.token_ids) == [0.0] * 5
    second = (greedy.token_ids[0] + 1) % 100
    changed = [second, *greedy.token_ids[1:]]
    assert hf_choice_gaps(tiny_llama_dir, prompt, changed)[0] > 0.0


def test_tiny_tokenizer_keeps_text_and_has_a_chat_template(tiny_llama_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    text = "Grüße, 世界! 12  34\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_answers_and_ends_its_turn(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    (answer,) = hf_greedy(smollm2_dir, [prompt], max_tokens=40)
    assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_splits_digits_off_before_spaces(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
