# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters do what they say, and no row of a batch sees another's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from tests.engine.engines import (
    CHUNK,
    add,
    all_tokens,
    generate,
    greedy,
    prompt,
    run_to_the_end,
    tokens_of,
)
from tests.models import VOCAB_SIZE
from tests.oracle import hf_greedy, load_model

NEW = 16


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **more)


def greedy_tokens(model_dir: Path, tokens: list[int], number: int = NEW) -> list[int]:
    return hf_greedy(model_dir, [tokens], number, ignore_eos=True)[0].token_ids


MIX: tuple[SamplingParams, ...] = (
    greedy(NEW),
    sampled(temperature=0.8, seed=1),
    greedy(NEW, repetition_penalty=2.0),
    sampled(temperature=1.5, top_k=5, seed=2),
    greedy(NEW, min_tokens=8, stop_token_ids=list(range(256))),
    sampled(temperature=1.0, top_p=0.5, seed=3),
    greedy(NEW, logit_bias={77: 50.0, 78: 50.0}),
    sampled(temperature=0.7, min_p=0.1, presence_penalty=1.0, seed=4),
    greedy(NEW, allowed_token_ids=[100, 101, 102]),
    sampled(temperature=0.01, frequency_penalty=1.5, seed=5),
    greedy(5, logprobs=2),
)


class TestNeighbours:
    @pytest.fixture(scope="class")
    def alone(self, tiny_llm: LLM) -> list[list[int]]:
        return [
            tokens_of(generate(tiny_llm, [prompt(7 + i, seed=31)], params)[0])
            for i, params in enumerate(MIX)
        ]

    def test_together_as_alone(self, tiny_llm: LLM, alone: list[list[int]]) -> None:
        """Four rows, and buckets with one row of padding when three are left."""
        prompts = [prompt(7 + i, seed=31) for i in range(len(MIX))]
        assert all_tokens(generate(tiny_llm, prompts, MIX)) == alone
        assert all_tokens(generate(tiny_llm, prompts[::-1], MIX[::-1])) == alone[::-1]
        assert len({tuple(tokens) for tokens in alone}) == len(MIX)

    def test_while_others_come_and_go(self, tiny_llm: LLM, alone: list[list[int]]) -> None:
        arrivals = {
            2 * i: partial(add, tiny_llm, str(i), prompt(7 + i, seed=31), MIX[i])
            for i in range(len(MIX))
        }
        outputs = run_to_the_end(tiny_llm, arrivals)
        assert [tokens_of(outputs[str(i)]) for i in range(len(MIX))] == alone


class TestSeeds:
    def test_same_seed_same_tokens(self, tiny_llm: LLM) -> None:
        """Whatever the chunks of the prompt: a chunk before the last draws nothing."""
        for length in (5, CHUNK, CHUNK + 1, 3 * CHUNK):
            first, second, other = (
                tokens_of(generate(tiny_llm, [prompt(length)], sampled(seed=seed))[0])
                for seed in (7, 7, 8)
            )
            assert first == second
            assert first != other

    def test_a_seed_does_not_depend_on_chunks_or_hits(self, tiny_llm: LLM) -> None:
        tokens = prompt(3 * CHUNK, seed=32)
        results = []
        for warm in (False, True, False):
            if not warm:
                assert tiny_llm.reset_prefix_cache()
            (output,) = generate(tiny_llm, [tokens], sampled(seed=9))
            assert (output.num_cached_tokens > 0) == warm
            results.append(tokens_of(output))
        assert results[0] == results[1] == results[2]

    def test_n_completions(self, tiny_llm: LLM) -> None:
        """Each is the one that its own seed gives; in a mixed batch too."""
        params = sampled(n=3, seed=11)
        first, _ = generate(tiny_llm, [prompt(40), prompt(6)], [params, greedy(NEW)])
        second, _ = generate(tiny_llm, [prompt(40), prompt(9)], [params, sampled(n=2, seed=3)])
        for output in (first, second):
            assert [item.index for item in output.outputs] == [0, 1, 2]
        texts = [tuple(item.token_ids) for item in first.outputs]
        assert len(set(texts)) == 3
        assert texts == [tuple(item.token_ids) for item in second.outputs]

    def test_frequencies_follow_the_model(self, tiny_llm: LLM, tiny_llama_dir: Path) -> None:
        """600 draws of one token; nothing outside the top 4 and each about as often as it should.

        Six standard deviations of a binomial: a right sampler fails once in 10^8 seeds.
        """
        with torch.inference_mode():
            ids = torch.tensor([prompt(12)])
            logits = load_model(tiny_llama_dir, torch.float32)(ids).logits[0, -1]
        best = logits.topk(4)
        shares = dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))
        draws = []
        for seed in range(6):
            params = SamplingParams(n=100, max_tokens=1, top_k=4, seed=seed)
            (output,) = generate(tiny_llm, [prompt(12)], params)
            draws += [item.token_ids[0] for item in output.outputs]
        assert set(draws) <= set(shares)
        for token, share in shares.items():
            deviation = (len(draws) * share * (1 - share)) ** 0.5
            assert abs(draws.count(token) - len(draws) * share) < 6 * deviation


class TestStopping:
    @pytest.mark.parametrize("length", [5, CHUNK, 2 * CHUNK + 3])
    def test_min_tokens_after_a_partial_prefill(
        self, tiny_llm: LLM, tiny_llama_dir: Path, length: int
    ) -> None:
        """Alone in the engine, a first chunk yields no token to hold the stop back for."""
        tokens = prompt(length, seed=33)
        plain = greedy_tokens(tiny_llama_dir, tokens)
        stop = plain[2]
        (stopped,) = generate(tiny_llm, [tokens], greedy(NEW, stop_token_ids=[stop]))
        assert tokens_of(stopped) == plain[:3]
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
        params = greedy(NEW, stop_token_ids=[stop], min_tokens=8)
        (held,) = generate(tiny_llm, [tokens], params)
        got = tokens_of(held)
        assert len(got) >= 8
        assert stop not in got[:8]
        assert got == greedy_without(tiny_llama_dir, tokens, stop, 8)[: len(got)]

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_string_across_tokens(
        self, tiny_llm: LLM, tiny_llama_dir: Path, include: bool
    ) -> None:
        tokens = prompt(CHUNK + 3, seed=34)
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
        pieces = [tokenizer.decode([t]) for t in greedy_tokens(tiny_llama_dir, tokens)]
        text = "".join(pieces)
        start = len("".join(pieces[:5])) - 1  # the last character of one token, the first of next
        stop = text[start : start + 2]
        end = text.index(stop)
        params = greedy(NEW, stop=[stop], include_stop_str_in_output=include)
        (output,) = generate(tiny_llm, [tokens], params)
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: end + (len(stop) if include else 0)]

    def test_end_of_sequence(self, tiny_llm: LLM) -> None:
        """The model's own end token stops, is counted and leaves no text; or is ignored."""
        forced = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {2: 100.0}}
        (ends,) = generate(tiny_llm, [prompt(5)], SamplingParams(**forced))
        assert (tokens_of(ends), ends.outputs[0].text) == ([2], "")
        assert ends.outputs[0].finish_reason == "stop"
        (goes_on,) = generate(tiny_llm, [prompt(5)], SamplingParams(**forced, ignore_eos=True))
        assert tokens_of(goes_on) == [2] * 6
        assert goes_on.outputs[0].finish_reason == "length"


@torch.inference_mode()
def greedy_without(model_dir: Path, tokens: list[int], banned: int, number: int) -> list[int]:
    """Greedy text of `NEW` tokens that stops at `banned`, barred from the first `number`."""
    model = load_model(model_dir, torch.float32)
    new: list[int] = []
    while len(new) < NEW and (not new or new[-1] != banned):
        logits = model(torch.tensor([[*tokens, *new]])).logits[0, -1]
        if len(new) < number:
            logits[banned] = -torch.inf
        new.append(int(logits.argmax()))
    return new


class TestLogits:
    """What changes logits is honoured at temperature 0 too."""

    def test_allowed_tokens(self, tiny_llm: LLM) -> None:
        allowed = [40, 41]
        for params in (
            greedy(NEW, allowed_token_ids=allowed),
            sampled(seed=1, allowed_token_ids=allowed),
        ):
            (output,) = generate(tiny_llm, [prompt(5)], params)
            assert set(tokens_of(output)) <= set(allowed)

    def test_bad_words(self, tiny_llm: LLM, tiny_llama_dir: Path) -> None:
        tokens = prompt(5)
        plain = greedy_tokens(tiny_llama_dir, tokens)
        word = AutoTokenizer.from_pretrained(tiny_llama_dir).decode([plain[1]])
        (output,) = generate(tiny_llm, [tokens], greedy(NEW, bad_words=[word]))
        assert tokens_of(output)[0] == plain[0]
        assert plain[1] not in tokens_of(output)

    def test_repetition_penalty(self, tiny_llm: LLM, tiny_llama_dir: Path) -> None:
        tokens = prompt(5)
        (output,) = generate(tiny_llm, [tokens], greedy(NEW, repetition_penalty=50.0))
        assert len(set(tokens_of(output)) | set(tokens)) == NEW + len(set(tokens))

    def test_every_token_can_be_drawn(self, tiny_llm: LLM) -> None:
        """Also the last of the vocabulary, and none beyond it."""
        for token in (3, VOCAB_SIZE - 1):
            (output,) = generate(tiny_llm, [prompt(5)], sampled(seed=1, logit_bias={token: 100.0}))
            assert tokens_of(output) == [token] * NEW
        flat = SamplingParams(n=64, max_tokens=4, temperature=2.0, seed=5, ignore_eos=True)
        (output,) = generate(tiny_llm, [prompt(5)], flat)
        drawn = {token for item in output.outputs for token in item.token_ids}
        assert len(drawn) > 50
        assert max(drawn) < VOCAB_SIZE
