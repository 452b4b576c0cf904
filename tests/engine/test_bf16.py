# SPDX-License-Identifier: Apache-2.0
"""bfloat16 outputs obey the rule of bf16_rule.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.bf16_rule import check_bf16
from tests.engine.engines import BLOCK, CHUNK, generate, greedy, prompt, running_engine
from tests.oracle import hf_greedy

EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 200]


def test_tiny_llama(tiny_llama_dir: Path) -> None:
    """A random model whose large weights make noise large: the rule, not the tokens, is tested."""
    prompts = [prompt(length) for length in EDGES]
    with running_engine(tiny_llama_dir, dtype="bfloat16") as llm:
        outputs = generate(llm, prompts, greedy(40, logprobs=1))
    check_bf16(tiny_llama_dir, outputs, hf_greedy(tiny_llama_dir, prompts, 40, ignore_eos=True))


def test_the_rule_refuses_a_wrong_token(tiny_llama_dir: Path) -> None:
    """A token that is only the tenth best is no near-tie, even in this noisy model."""
    prompts = [prompt(9)]
    truth = hf_greedy(tiny_llama_dir, prompts, 8, ignore_eos=True)
    with running_engine(tiny_llama_dir, dtype="bfloat16") as llm:
        (output,) = generate(llm, prompts, greedy(8, logprobs=10))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    last = completion.logprobs[-1]
    tenth = next(token for token, place in last.items() if place.rank == 10)
    check_bf16(tiny_llama_dir, [output], truth)
    completion.token_ids = [*completion.token_ids[:-1], tenth]
    with pytest.raises(AssertionError, match=r"below the best"):
        check_bf16(tiny_llama_dir, [output], truth)
