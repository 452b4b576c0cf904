# SPDX-License-Identifier: Apache-2.0
"""Prefix hits: how many tokens, what they change (nothing), and what they leave behind (nothing).

With sub-blocks of S tokens a prompt of L tokens that was seen before hits S * floor((L - 1) / S) of
them; by whole blocks S is the block. `check_idle` sees that each block came back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import LLM, RequestOutput

from rbln_vllm.core.kv_cache.copies import KVCopy
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    add,
    check_idle,
    core_of,
    counted_preemptions,
    generate,
    greedy,
    kv_pools,
    prompt,
    recorded_steps,
    run_to_the_end,
    runner_of,
    running_engine,
    tokens_of,
)
from tests.oracle import hf_greedy

NEW = 5
SUB = 8
WIDE = 128
"""A block of two chunks."""


@dataclass(frozen=True)
class Kind:
    """How an engine caches: the grain of hits, and the arguments that make it so."""

    grain: int
    block: int
    arguments: dict[str, Any]

    def hits(self, length: int) -> int:
        """Of a prompt that was seen before: at least one token is computed."""
        return self.grain * ((length - 1) // self.grain)


def sub_blocks(size: int, block: int) -> Kind:
    return Kind(size, block, {"block_size": block, "additional_config": {"sub_block_size": size}})


KINDS = {
    "sub-blocks": sub_blocks(SUB, BLOCK),
    "sub-blocks of a chunk": sub_blocks(CHUNK, WIDE),
    # An option of this implementation alone.
    "whole blocks": Kind(
        BLOCK,
        BLOCK,
        {"model_impl": "vllm", "additional_config": {"enable_sub_block_cache": False}},
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def warm_llm(kind: Kind, tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(tiny_llama_dir, **kind.arguments) as engine:
        yield engine


@pytest.fixture
def llm(warm_llm: LLM) -> Iterator[LLM]:
    """An engine of one kind whose cache is empty; idle afterwards."""
    assert warm_llm.reset_prefix_cache()
    yield warm_llm
    settle(warm_llm)
    check_idle(warm_llm)


def ask(llm: LLM, tokens: Sequence[int], new: int = NEW, **more: Any) -> RequestOutput:
    """One greedy answer, alone in the engine."""
    inputs: Any = {"prompt_token_ids": list(tokens), **more}
    (output,) = llm.generate([inputs], greedy(new), use_tqdm=False)
    return output


def settle(llm: LLM) -> None:
    """Steps until no step is in flight: after an abort one may be, with copies in it."""
    core = core_of(llm)
    while core.scheduler.has_requests() or core.batch_queue:
        core.step_fn()


@contextmanager
def recorded_copies(llm: LLM) -> Iterator[list[list[KVCopy]]]:
    """The copies of each step that has some."""
    executable = runner_of(llm)._store.executable
    calls: list[list[KVCopy]] = []
    original = executable.copy_kv

    def copy_kv(copies: Any) -> None:
        calls.append(list(copies))
        original(copies)

    executable.copy_kv = copy_kv  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        executable.copy_kv = original  # type: ignore[method-assign]


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """What each logits program returned first: the rows that were asked for."""
    executable = runner_of(llm)._store.executable
    logits: list[Tensor] = []
    original = executable.run

    def run(name: str, inputs: Mapping[str, Tensor], *tokens: int) -> tuple[Tensor, ...]:
        outputs = original(name, inputs, *tokens)
        if name.startswith("logits"):
            logits.append(outputs[0][:1].clone())
        return outputs

    executable.run = run  # type: ignore[method-assign, assignment]
    try:
        yield logits
    finally:
        executable.run = original  # type: ignore[method-assign]


def edges(kind: Kind) -> list[int]:
    """Lengths at which a granule begins or ends."""
    sizes = (kind.grain, BLOCK, CHUNK, kind.block, MAX_LEN - NEW - 1)
    around = {size + more for size in sizes for more in (-1, 0, 1)}
    return sorted(length for length in {1, *around} if 1 <= length <= MAX_LEN - NEW)


class TestHits:
    def test_of_a_repeated_prompt(self, llm: LLM, kind: Kind) -> None:
        """The rule for repeated prompts, at every edge; and the same answer as without a hit."""
        for length in edges(kind):
            assert llm.reset_prefix_cache()
            tokens = prompt(length, seed=41)
            cold, warm = ask(llm, tokens), ask(llm, tokens)
            assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, kind.hits(length))
            assert tokens_of(warm) == tokens_of(cold), length

    def test_of_the_longest_prompt(self, llm: LLM, kind: Kind) -> None:
        tokens = prompt(MAX_LEN - 1, seed=42)
        cold, warm = ask(llm, tokens, new=1), ask(llm, tokens, new=1)
        assert warm.num_cached_tokens == kind.hits(MAX_LEN - 1)
        assert tokens_of(warm) == tokens_of(cold)

    def test_of_a_shared_prefix(self, llm: LLM, kind: Kind, tiny_llama_dir: Path) -> None:
        """Prompts that part at every place around the edges."""
        first = prompt(2 * CHUNK + 9, seed=43)
        ask(llm, first)
        places = [p for p in edges(kind) if p < len(first)]
        prompts = [[*first[:place], *prompt(20, seed=44 + place)] for place in places]
        expected = hf_greedy(tiny_llama_dir, prompts, NEW, ignore_eos=True)
        for place, tokens, answer in zip(places, prompts, expected, strict=True):
            output = ask(llm, tokens)
            # Earlier prompts hold the same tokens up to their own place, and no more.
            assert output.num_cached_tokens == kind.grain * (place // kind.grain)
            assert tokens_of(output) == answer.token_ids

    def test_of_the_next_turn(self, llm: LLM, kind: Kind, tiny_llama_dir: Path) -> None:
        """The partly filled last block of a finished request: a chat goes on after its answer.

        The answer's last token was drawn but never computed.
        """
        for length in range(CHUNK - 2, CHUNK + 9, 3):
            assert llm.reset_prefix_cache()
            turn = prompt(length, seed=45)
            turn = [*turn, *tokens_of(ask(llm, turn))]
            follow_up = [*turn, *prompt(7, seed=46)]
            output = ask(llm, follow_up)
            assert output.num_cached_tokens == kind.grain * ((len(turn) - 1) // kind.grain)
            (answer,) = hf_greedy(tiny_llama_dir, [follow_up], NEW, ignore_eos=True)
            assert tokens_of(output) == answer.token_ids

    def test_of_a_request_that_is_running(self, llm: LLM, kind: Kind) -> None:
        """What a step has written can be hit from the next step on."""
        tokens = prompt(CHUNK + 9, seed=47)
        alone = tokens_of(ask(llm, tokens, new=40))
        assert llm.reset_prefix_cache()
        add(llm, "first", tokens, greedy(40))

        def join() -> None:
            add(llm, "second", tokens, greedy(40))

        outputs = run_to_the_end(llm, {12: join})
        assert tokens_of(outputs["first"]) == tokens_of(outputs["second"]) == alone
        assert outputs["second"].num_cached_tokens == kind.hits(len(tokens))

    def test_salt_separates(self, llm: LLM, kind: Kind) -> None:
        tokens = prompt(2 * WIDE - 20, seed=48)
        hits = []
        for salt in (None, "a", "b", "a", None, "b"):
            more: dict[str, Any] = {"cache_salt": salt} if salt else {}
            hits.append(ask(llm, tokens, **more).num_cached_tokens)
        assert hits == [0, 0, 0, *[kind.hits(len(tokens))] * 3]

    def test_none_after_a_reset(self, llm: LLM) -> None:
        tokens = prompt(CHUNK + 9, seed=49)
        ask(llm, tokens)
        assert llm.reset_prefix_cache()
        assert ask(llm, tokens).num_cached_tokens == 0


class TestCopies:
    def test_one_call_for_each_hit_inside_a_block(self, llm: LLM, kind: Kind) -> None:
        for length in edges(kind):
            assert llm.reset_prefix_cache()
            tokens = prompt(length, seed=50)
            ask(llm, tokens)
            with recorded_copies(llm) as calls:
                ask(llm, tokens)
            inside = kind.hits(length) % kind.block
            assert [[copy.num_tokens for copy in call] for call in calls] == [[inside]] * bool(
                inside
            )

    def test_the_source_stays_as_it_is(self, llm: LLM, kind: Kind) -> None:
        """Two prompts that part within a block each have their own copy of it."""
        if kind.grain == kind.block:
            pytest.skip("whole blocks are not copied")
        base = prompt(kind.grain + 1 if kind.grain > 1 else 9, seed=51)
        ask(llm, base)
        with recorded_copies(llm) as calls:
            ask(llm, [*base[:-1], 7, 8, 9])
            ((copy,),) = calls
            before = [pool[copy.src_block_id].clone() for pool in kv_pools(llm)]
            ask(llm, [*base[:-1], 9, 8, 7])
        for pool, source in zip(kv_pools(llm), before, strict=True):
            assert torch.equal(pool[copy.src_block_id], source)
            copied = pool[copy.dst_block_id, :, : copy.num_tokens]
            assert torch.equal(copied, source[:, : copy.num_tokens])


class TestLogits:
    """The same logits bit for bit, in the prompt's last step and in all decode steps.

    But where a hit leaves one token of a chunk that had more: it runs through a decode program,
    whose attention adds up in another order than that of a prefill.
    """

    def test_after_hits_of_every_length(self, llm: LLM, kind: Kind) -> None:
        exact = rounded = 0
        for length in range(CHUNK + 1, 3 * CHUNK + 2, 3):
            assert llm.reset_prefix_cache()
            tokens = prompt(length, seed=52)
            with recorded_logits(llm) as cold:
                ask(llm, tokens)
            with recorded_logits(llm) as warm:
                hits = ask(llm, tokens).num_cached_tokens
            assert hits == kind.hits(length) > 0
            assert len(warm) == NEW
            if length - hits == 1 and hits % CHUNK:
                rounded += 1
                for one, other in zip(cold[-NEW:], warm, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)
            else:
                exact += 1
                assert all(map(torch.equal, cold[-NEW:], warm)), length
        assert exact > 30
        assert bool(rounded) is (kind.grain < CHUNK)


def test_abort_at_every_step_after_a_hit(llm: LLM, kind: Kind) -> None:
    """A hit inside a block, several chunks after it, and decodes: whichever step is the last."""
    shared = prompt(CHUNK + SUB + 3, seed=54)
    longer = [*shared, *prompt(2 * CHUNK, seed=55)]
    expected = tokens_of(ask(llm, longer))

    def warm() -> None:
        assert llm.reset_prefix_cache()
        ask(llm, shared)
        add(llm, "victim", longer, greedy(NEW))

    warm()
    with recorded_steps(llm) as steps:
        run_to_the_end(llm)
    for step in range(len(steps) + 1):
        warm()
        run_to_the_end(llm, {step: lambda: llm.llm_engine.abort_request(["victim"])})
        settle(llm)
        check_idle(llm)
        again = ask(llm, longer)
        assert tokens_of(again) == expected, f"abort before {step}"
        assert (again.num_cached_tokens or 0) >= kind.grain * (len(shared) // kind.grain)


def family(seed: int, size: int) -> list[list[int]]:
    """Prompts that share prefixes of all sorts of lengths, some of them prefixes of others."""
    generator = random.Random(seed)
    prompts = [prompt(generator.randrange(1, 40), seed)]
    while len(prompts) < size:
        parent = generator.choice(prompts)
        kept = generator.randrange(len(parent) + 1)
        child = [*parent[:kept], *prompt(generator.randrange(1, 30), generator.randrange(1 << 30))]
        prompts.append(child[:100])
    return prompts


@pytest.mark.parametrize("sub_block", [1, 8])
def test_traffic_in_a_tiny_pool(tiny_llama_dir: Path, sub_block: int) -> None:
    """Hits, copies, evictions and preemptions at once: all answers as without a cache."""
    prompts = family(seed=5, size=40)
    expected = [x.token_ids for x in hf_greedy(tiny_llama_dir, prompts, 20, ignore_eos=True)]
    arguments = sub_blocks(sub_block, 16).arguments
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    with running_engine(tiny_llama_dir, num_gpu_blocks_override=17, **sizes, **arguments) as llm:
        with counted_preemptions(llm), recorded_copies(llm) as calls:
            for _ in range(2):
                outputs = generate(llm, prompts, greedy(20))
                assert [tokens_of(output) for output in outputs] == expected
                check_idle(llm)
        assert len(calls) > 20
        assert all(0 < copy.num_tokens < 16 for call in calls for copy in call)


def test_off(tiny_llama_dir: Path) -> None:
    with running_engine(tiny_llama_dir, enable_prefix_caching=False) as llm:
        tokens = prompt(3 * BLOCK, seed=56)
        with recorded_copies(llm) as calls:
            outputs = [ask(llm, tokens) for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])
        assert not calls


def test_a_long_prefix_within_one_block(tiny_model_dir: Any) -> None:
    """3,000 tokens in a block of 4,096: whole blocks give nothing, sub-blocks of 128 give 2,944."""
    model = tiny_model_dir("LlamaForCausalLM", max_position_embeddings=8192)
    sizes = {"max_model_len": 8192, "max_num_batched_tokens": 128, "max_num_seqs": 1}
    arguments = {**sub_blocks(128, 4096).arguments, **sizes}
    shared = prompt(3000, seed=57)
    with running_engine(model, num_gpu_blocks_override=5, **arguments) as llm:
        ask(llm, shared)
        longer = [*shared, *prompt(200, seed=58)]
        with recorded_steps(llm) as steps:
            warm = ask(llm, longer)
        assert warm.num_cached_tokens == 2944
        assert sum(steps[0].plan.tokens) == 128, "the first chunk does not begin where the hit ends"
        assert llm.reset_prefix_cache()
        cold = ask(llm, longer)
        assert (cold.num_cached_tokens, tokens_of(cold)) == (0, tokens_of(warm))
        check_idle(llm)
