# SPDX-License-Identifier: Apache-2.0
"""At and beyond each limit: the right answer, or a 4xx that says what is wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.oracle import hf_greedy
from tests.server.live import MAX_LEN, MODEL, LiveServer, joined_text, prompt, token_ids

LIMIT = f"maximum context length is {MAX_LEN} tokens"
# vLLM estimates a text's tokens by its characters first; this one is too long by any estimate.
LONG_TEXT = "a b c " * 2000


def refuses_without_running(server: LiveServer, asked: Any, words: str, **more: Any) -> None:
    """A 400 with `words`, and no prompt of the request was run even in part.

    vLLM finds some faults only after it has begun to answer a stream: it then says the same in
    the stream.
    """
    before = server.metrics()
    with pytest.raises(openai.BadRequestError) as refused:
        server.complete(asked, **more)
    with pytest.raises(openai.APIError) as broken_off:
        list(server.stream(asked, **more))
    assert words in str(refused.value)
    assert words in str(broken_off.value)
    server.tokens(prompt(3), max_tokens=1)  # whatever was queued before it has been counted by now
    after = server.metrics()
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 3
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 1


class TestEmptyPrompts:
    """Prompts without a token."""

    EMPTY: tuple[tuple[Any, str], ...] = (
        ("", "must be provided and non-empty"),
        ([], "at least one prompt"),
        ([""], "cannot be empty"),
        (["a", ""], "cannot be empty"),
        ([[]], "cannot be empty"),
        ([[5, 6], []], "cannot be empty"),
    )

    @pytest.mark.parametrize(("asked", "words"), EMPTY, ids=repr)
    def test_refused_and_not_half_run(self, server: LiveServer, asked: Any, words: str) -> None:
        refuses_without_running(server, asked, words, max_tokens=5)


class TestContext:
    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_a_prompt_that_leaves_room_for_one_token(
        self, server: LiveServer, tiny_llama_dir: Path, max_tokens: int
    ) -> None:
        asked = prompt(MAX_LEN - 1)
        completion = server.complete(asked, max_tokens=max_tokens, ignore_eos=True)
        (expected,) = hf_greedy(tiny_llama_dir, [asked], 1, ignore_eos=True)
        assert token_ids(completion.choices[0]) == expected.token_ids
        assert completion.choices[0].finish_reason == "length"

    def test_output_to_the_last_position(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        asked = prompt(MAX_LEN - 30)
        completion = server.complete(asked, max_tokens=MAX_LEN, ignore_eos=True)
        (expected,) = hf_greedy(tiny_llama_dir, [asked], 30, ignore_eos=True)
        assert token_ids(completion.choices[0]) == expected.token_ids
        assert completion.choices[0].finish_reason == "length"

    @pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 2 * MAX_LEN])
    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_longer_prompts_are_refused_with_the_limit(
        self, server: LiveServer, length: int, max_tokens: int
    ) -> None:
        refuses_without_running(server, prompt(length), LIMIT, max_tokens=max_tokens)

    def test_one_long_prompt_among_good_ones(self, server: LiveServer) -> None:
        asked = [prompt(5), prompt(MAX_LEN), prompt(6)]
        refuses_without_running(server, asked, LIMIT, max_tokens=5)

    def test_a_long_text(self, server: LiveServer) -> None:
        with pytest.raises(openai.BadRequestError, match=LIMIT):
            server.complete(LONG_TEXT, max_tokens=1)

    def test_a_long_chat(self, server: LiveServer) -> None:
        create = server.client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=LIMIT):
            create(model=MODEL, messages=[{"role": "user", "content": LONG_TEXT}])


class TestParameters:
    @pytest.mark.parametrize(
        ("parameter", "words"),
        [
            ({"temperature": -1}, "temperature must be non-negative"),
            ({"logprobs": 1000}, "greater than max allowed: 20"),
            ({"top_p": 2}, r"top_p must be in (0, 1]"),
            ({"n": 0}, "n must be at least 1"),
            ({"n": 2}, "n must be 1 when using greedy sampling"),
            ({"max_tokens": -1}, "max_tokens must be at least 1"),
            ({"stop": [""]}, "stop cannot contain an empty string"),
            ({"allowed_token_ids": [100_000]}, "out-of-vocab"),
            ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be less than"),
        ],
        ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
    )
    def test_bad_ones_are_refused(
        self, server: LiveServer, parameter: dict[str, Any], words: str
    ) -> None:
        refuses_without_running(server, prompt(4), words, **parameter)

    def test_unknown_model(self, server: LiveServer) -> None:
        with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
            server.complete(prompt(4), model="other")

    def test_token_outside_the_vocabulary(self, server: LiveServer) -> None:
        refuses_without_running(server, [5, 100_000], "Token id 100000 is out of vocabulary")

    def test_one_token(self, server: LiveServer) -> None:
        completion = server.complete(prompt(12), max_tokens=1)
        assert len(token_ids(completion.choices[0])) == 1
        assert completion.choices[0].finish_reason == "length"


class TestSeveralChoices:
    """Children of one request do not overwrite one another."""

    @pytest.mark.parametrize("n", [3, 6])
    def test_each_index_once_and_as_if_alone(self, server: LiveServer, n: int) -> None:
        sampled = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
        together = server.complete(prompt(20), n=n, seed=11, **sampled)
        assert [choice.index for choice in together.choices] == list(range(n))
        texts = [choice.text for choice in together.choices]
        assert len(set(texts)) == n
        # Child number i samples with seed + i.
        alone = [server.complete(prompt(20), seed=11 + i, **sampled) for i in range(n)]
        assert texts == [completion.choices[0].text for completion in alone]
        assert together.usage is not None
        assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (20, 12 * n)

    def test_streamed(self, server: LiveServer) -> None:
        sampled = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "n": 3, "seed": 11}
        whole = server.complete(prompt(20), **sampled)
        chunks = list(server.stream(prompt(20), **sampled))
        for choice in whole.choices:
            assert joined_text(chunks, choice.index) == choice.text

    def test_two_clients_with_one_request_id(self, server: LiveServer) -> None:
        prompts = [prompt(20, seed) for seed in (1, 2)]
        expected = [server.tokens(each, 40) for each in prompts]

        def ask(asked: list[int]) -> list[int]:
            headers = {"X-Request-Id": "the-same"}
            chunks = server.stream(asked, max_tokens=40, ignore_eos=True, extra_headers=headers)
            return [t for chunk in chunks for choice in chunk.choices for t in token_ids(choice)]

        with ThreadPoolExecutor(max_workers=2) as pool:
            assert list(pool.map(ask, prompts)) == expected
