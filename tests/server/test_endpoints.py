# SPDX-License-Identifier: Apache-2.0
"""Every endpoint answers, streamed and not, with the right text and the right counts."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoTokenizer

from tests.server.live import (
    MAX_LEN,
    MODEL,
    SEQS,
    LiveServer,
    joined_text,
    prompt,
    token_ids,
)
from tests.server_process import fetch

TEXT = "You may reproduce and distribute"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What may I reproduce?"},
]
EOS = 2


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        answer = json.loads(response.read())
    assert isinstance(answer, dict)
    return answer


class TestOperators:
    def test_models_names_the_model_and_its_limit(self, server: LiveServer) -> None:
        (model,) = server.client.models.list().data
        assert model.id == MODEL
        assert model.model_dump()["max_model_len"] == MAX_LEN

    def test_health(self, server: LiveServer) -> None:
        assert fetch(f"{server.url}/health") == b""

    def test_metrics_have_vllms_numbers_and_ours(self, server: LiveServer) -> None:
        before = server.metrics()
        server.tokens(prompt(10), max_tokens=7)
        after = server.metrics()
        assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 10
        assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
        # prefill; decode of 1, 2, 4; logits of 1, 2, 4 rows and of a chunk; sampler, draw and mask
        # of 1, 2, 4
        assert after["rbln_programs"] == 17
        assert after["rbln_programs_compiled_after_ready_total"] == 0
        assert after["rbln_requests_refused_for_program_total"] == 0


class TestTokenizer:
    def test_tokenize_and_back(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        expected = AutoTokenizer.from_pretrained(tiny_llama_dir)(TEXT).input_ids
        answer = post(server, "/tokenize", {"model": MODEL, "prompt": TEXT})
        assert answer["tokens"] == expected
        assert (answer["count"], answer["max_model_len"]) == (len(expected), MAX_LEN)
        assert post(server, "/detokenize", {"model": MODEL, "tokens": expected})["prompt"] == TEXT

    def test_tokenize_a_chat(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
        chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
        answer = post(server, "/tokenize", {"model": MODEL, "messages": MESSAGES})
        assert answer["tokens"] == list(chat["input_ids"])


class TestCompletions:
    def test_text_and_its_tokens_are_the_same_prompt(
        self, server: LiveServer, tiny_llama_dir: Path
    ) -> None:
        tokens = AutoTokenizer.from_pretrained(tiny_llama_dir)(TEXT).input_ids
        of_text, of_tokens = (server.complete(p, max_tokens=12) for p in (TEXT, tokens))
        assert of_text.choices[0].text == of_tokens.choices[0].text
        assert token_ids(of_text.choices[0]) == token_ids(of_tokens.choices[0])

    def test_joined_deltas_equal_the_text(self, server: LiveServer) -> None:
        whole = server.complete(TEXT, max_tokens=40)
        chunks = list(server.stream(TEXT, max_tokens=40))
        assert joined_text(chunks) == whole.choices[0].text
        deltas = [t for chunk in chunks for choice in chunk.choices for t in token_ids(choice)]
        assert deltas == token_ids(whole.choices[0])
        assert len(chunks) > 10, "the text came in few pieces, so not as it was made"
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]

    def test_usage(self, server: LiveServer) -> None:
        usage = server.complete(prompt(37), max_tokens=9).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 9, 46)

    def test_usage_of_a_stream_comes_last_and_only_when_asked_for(self, server: LiveServer) -> None:
        asked = {"include_usage": True}
        chunks = list(server.stream(prompt(37), max_tokens=9, stream_options=asked))
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 9, 46)
        assert chunks[-1].choices == []
        assert not any(chunk.usage for chunk in server.stream(prompt(37), max_tokens=9))

    def test_several_prompts_in_one_request(self, server: LiveServer) -> None:
        prompts = [prompt(20, seed) for seed in range(SEQS + 2)]
        together = server.complete(prompts, max_tokens=6)
        assert [choice.index for choice in together.choices] == list(range(len(prompts)))
        alone = [server.tokens(each, max_tokens=6) for each in prompts]
        assert [token_ids(choice) for choice in together.choices] == alone
        assert together.usage is not None
        assert together.usage.prompt_tokens == 20 * len(prompts)
        assert together.usage.completion_tokens == 6 * len(prompts)

    def test_the_end_of_text_token_stops(self, server: LiveServer) -> None:
        ended = server.complete(TEXT, max_tokens=10, logit_bias={str(EOS): 100})
        assert ended.choices[0].finish_reason == "stop"
        assert ended.choices[0].text == ""
        assert ended.usage is not None
        assert ended.usage.completion_tokens == 1


class TestChat:
    def test_joined_deltas_equal_the_text(self, server: LiveServer) -> None:
        chat = server.client.chat.completions
        whole = chat.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0)
        with chat.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        text = whole.choices[0].message.content
        assert text
        assert "".join(c.delta.content or "" for k in chunks for c in k.choices) == text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == whole.usage

    def test_the_template_is_applied(self, server: LiveServer, tiny_llama_dir: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
        tokens = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
        answer = server.client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0
        )
        completion = server.complete(list(tokens), max_tokens=20)
        assert answer.choices[0].message.content == completion.choices[0].text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens)

    def test_an_empty_conversation_is_refused(self, server: LiveServer) -> None:
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            server.client.chat.completions.create(model=MODEL, messages=[])
