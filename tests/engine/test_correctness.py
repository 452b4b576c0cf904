# SPDX-License-Identifier: Apache-2.0
"""Tokens equal Hugging Face's eager model: at granule edges, in batches, after prefix hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm import LLM

from rbln_vllm.devices import resolve_profile
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    all_tokens,
    generate,
    greedy,
    kv_pools,
    own_process,
    prompt,
    report,
    running_engine,
)
from tests.oracle import hf_choice_gaps, hf_greedy

EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]
LAST = MAX_LEN - 1


@pytest.fixture(autouse=True)
def empty_prefix_cache(request: pytest.FixtureRequest) -> None:
    """Every test computes its prompts itself, unless it says otherwise."""
    if "tiny_llm" in request.fixturenames:
        assert request.getfixturevalue("tiny_llm").reset_prefix_cache()


def expected_tokens(model_dir: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    results = hf_greedy(model_dir, prompts, max_tokens, ignore_eos=True)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("length", EDGES)
def test_edge_lengths_alone(tiny_llm: LLM, tiny_llama_dir: Path, length: int) -> None:
    tokens = prompt(length)
    got = all_tokens(generate(tiny_llm, [tokens], greedy(40)))
    assert got == expected_tokens(tiny_llama_dir, [tokens], 40)


def test_edge_lengths_together(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    """More prompts than rows: some wait, and batches change size while others decode."""
    prompts = [prompt(length, seed=1) for length in (*EDGES, LAST - 40)]
    got = all_tokens(generate(tiny_llm, prompts, greedy(40)))
    assert got == expected_tokens(tiny_llama_dir, prompts, 40)


def test_the_longest_prompt(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    """`max_model_len - 1` tokens leave room for one; so do others beside it."""
    prompts = [prompt(LAST), prompt(LAST - 1), prompt(3)]
    got = all_tokens(generate(tiny_llm, prompts, greedy(1)))
    assert got == expected_tokens(tiny_llama_dir, prompts, 1)


def test_a_sequence_grows_to_the_last_position(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    tokens = prompt(7)
    (output,) = generate(tiny_llm, [tokens], greedy(1000))
    assert output.outputs[0].finish_reason == "length"
    want = expected_tokens(tiny_llama_dir, [tokens], MAX_LEN - 7)
    assert all_tokens([output]) == want


def test_repeated_prompts_hit_the_prefix_cache(tiny_llm: LLM, tiny_llama_dir: Path) -> None:
    """A hit ends between two multiples of the chunk; what follows is computed from there."""
    prompts = [prompt(length, seed=2) for length in (*EDGES, 97, 3 * CHUNK)]
    want = expected_tokens(tiny_llama_dir, prompts, 12)
    cold = generate(tiny_llm, prompts, greedy(12))
    warm = generate(tiny_llm, prompts, greedy(12))
    assert all_tokens(cold) == all_tokens(warm) == want
    hits = [output.num_cached_tokens for output in warm]
    size = resolve_profile(None).default_sub_block_size
    assert size is not None
    assert hits == [(len(tokens) - 1) // size * size for tokens in prompts]
    longer = [[*tokens, *prompt(5)] for tokens in prompts]
    assert all_tokens(generate(tiny_llm, longer, greedy(12))) == expected_tokens(
        tiny_llama_dir, longer, 12
    )


SIZES = (
    # chunk, block, longest sequence, sequences
    pytest.param(64, 64, 64, 1, id="one block is the whole sequence"),
    pytest.param(16, 64, 128, 3, id="chunk below block"),
    pytest.param(96, 40, 200, 3, id="chunk is no multiple of block"),
    pytest.param(512, 32, 128, 4, id="chunk above the longest sequence"),
    pytest.param(1, 8, 24, 1, id="chunk of one token"),
)


@pytest.mark.parametrize(("chunk", "block", "longest", "sequences"), SIZES)
def test_other_sizes(
    tiny_llama_dir: Path, chunk: int, block: int, longest: int, sequences: int
) -> None:
    lengths = {1, chunk - 1, chunk, chunk + 1, block - 1, block, block + 1, longest - 1}
    prompts = [prompt(n, seed=3) for n in sorted(lengths) if 0 < n < longest]
    arguments = {"max_num_batched_tokens": chunk, "block_size": block}
    with running_engine(
        tiny_llama_dir, max_model_len=longest, max_num_seqs=sequences, **arguments
    ) as llm:
        outputs = generate(llm, prompts, [greedy(min(9, longest - len(p))) for p in prompts])
        assert report(llm)["compiled_after_ready"] == 0
    for tokens, output in zip(prompts, outputs, strict=True):
        (want,) = expected_tokens(tiny_llama_dir, [tokens], min(9, longest - len(tokens)))
        assert all_tokens([output]) == [want], f"prompt of {len(tokens)}"


def test_an_engine_in_its_own_process(tiny_llama_dir: Path) -> None:
    """vLLM's normal mode: the engine is another process than the caller's."""
    prompts = [prompt(length, seed=4) for length in EDGES]
    with own_process(), running_engine(tiny_llama_dir) as llm:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core")
        got = all_tokens(generate(llm, prompts, greedy(12)))
        assert report(llm)["compiled_after_ready"] == 0
    assert got == expected_tokens(tiny_llama_dir, prompts, 12)


def test_enforced_fp32(tiny_llama_dir: Path) -> None:
    """The option computes in float32 whatever the dtype asked for."""
    prompts = [prompt(length, seed=10) for length in EDGES]
    options = {"enforce_model_fp32": True}
    with running_engine(tiny_llama_dir, dtype="bfloat16", additional_config=options) as llm:
        assert {pool.dtype for pool in kv_pools(llm)} == {torch.float32}
        got = all_tokens(generate(llm, prompts, greedy(12)))
    assert got == expected_tokens(tiny_llama_dir, prompts, 12)


def test_kv_cache_in_half_precision(tiny_llama_dir: Path) -> None:
    """Keys and values are rounded, everything else is not: only near-ties may change.

    float16 keeps 11 significant bits; rounding keys and values moves this model's logits (up to
    about 10) by a few times 10 / 2^11.
    """
    prompts = [prompt(length, seed=10) for length in EDGES]
    with running_engine(tiny_llama_dir, kv_cache_dtype="float16") as llm:
        assert {pool.dtype for pool in kv_pools(llm)} == {torch.float16}
        outputs = all_tokens(generate(llm, prompts, greedy(12)))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert max(hf_choice_gaps(tiny_llama_dir, tokens, output)) < 8 * 10 / 2**11
