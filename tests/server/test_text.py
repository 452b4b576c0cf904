# SPDX-License-Identifier: Apache-2.0
"""From tokens to text: stop strings and characters that span tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.live import MODEL, LiveServer, joined_text, token_ids

PROMPT = "You may reproduce and distribute"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def both_ways(server: LiveServer, **parameters: Any) -> Any:
    """The only choice of a completion; streaming it gives the same text and end."""
    (choice,) = server.complete(PROMPT, **parameters).choices
    chunks = list(server.stream(PROMPT, **parameters))
    assert joined_text(chunks) == choice.text
    last = [streamed for chunk in chunks for streamed in chunk.choices][-1]
    assert last.finish_reason == choice.finish_reason
    assert last.model_dump()["stop_reason"] == choice.model_dump()["stop_reason"]
    return choice


@pytest.fixture(scope="module")
def pieces(shared_server: LiveServer, tiny_llama_dir: Path) -> list[str]:
    """The text of each of 30 greedy tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    return [tokenizer.decode([token]) for token in shared_server.tokens(PROMPT, 30)]


class TestStopStrings:
    def test_one_token(self, server: LiveServer, pieces: list[str]) -> None:
        stop = pieces[9]
        expected = "".join(pieces).split(stop)[0]
        choice = both_ways(server, max_tokens=30, ignore_eos=True, stop=stop)
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        assert choice.stop_reason == stop

    def test_split_over_three_tokens(self, server: LiveServer, pieces: list[str]) -> None:
        stop = pieces[8][-1] + pieces[9] + pieces[10][0]
        expected = "".join(pieces).split(stop)[0]
        assert expected.startswith("".join(pieces[:8]))
        choice = both_ways(server, max_tokens=30, ignore_eos=True, stop=["not in it", stop])
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        assert choice.stop_reason == stop

    def test_kept_in_the_text_when_asked(self, server: LiveServer, pieces: list[str]) -> None:
        stop = pieces[8][-1] + pieces[9] + pieces[10][0]
        choice = both_ways(
            server, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True
        )
        assert choice.text == "".join(pieces).split(stop)[0] + stop

    def test_never_met(self, server: LiveServer, pieces: list[str]) -> None:
        # Its beginning is what the text ends with: it must not be held back for ever.
        stop = pieces[-1] + "\N{SNOWMAN}"
        choice = both_ways(server, max_tokens=30, ignore_eos=True, stop=stop)
        assert (choice.text, choice.finish_reason) == ("".join(pieces), "length")

    def test_a_stop_token(self, server: LiveServer, pieces: list[str]) -> None:
        tokens = server.tokens(PROMPT, 30)
        stop = tokens[9]
        choice = both_ways(server, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
        assert token_ids(choice) == tokens[: tokens.index(stop) + 1]
        assert choice.stop_reason == stop
        assert choice.text == "".join(pieces[: tokens.index(stop)])


class TestCharactersOfSeveralTokens:
    TEXT = "ď 😀 👨‍👩‍👧 한국어 e\N{COMBINING ACUTE ACCENT} 世界"

    def test_joined_deltas_hold_whole_characters(
        self, server: LiveServer, tiny_llama_dir: Path
    ) -> None:
        choice = both_ways(server, max_tokens=100, structured_outputs={"choice": [self.TEXT]})
        assert choice.text == self.TEXT
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
        alone = [tokenizer.decode([token]) for token in token_ids(choice)]
        assert sum(REPLACEMENT in text for text in alone) > 20, "tokens hold whole characters"

    def test_in_a_chat(self, server: LiveServer) -> None:
        stream = server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=100,
            stream=True,
            extra_body={"structured_outputs": {"choice": [self.TEXT]}},
        )
        deltas = [c.delta.content or "" for chunk in stream for c in chunk.choices]
        assert "".join(deltas) == self.TEXT
        assert not any(REPLACEMENT in delta for delta in deltas)

    def test_in_an_echoed_prompt(self, server: LiveServer) -> None:
        # vLLM does not echo text to who asked for token ids.
        chunks = list(server.stream(self.TEXT, max_tokens=5, echo=True, return_token_ids=False))
        assert joined_text(chunks).startswith(self.TEXT)
        assert REPLACEMENT not in joined_text(chunks)

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_output_cut_in_the_middle_of_a_character(
        self, server: LiveServer, tiny_llama_dir: Path, cut: int
    ) -> None:
        tokens = AutoTokenizer.from_pretrained(tiny_llama_dir)("x😀").input_ids[: 1 + cut]
        parameters = {"max_tokens": 1 + cut, "structured_outputs": {"choice": ["x😀"]}}
        choice = both_ways(server, **parameters)
        assert token_ids(choice) == tokens
        assert choice.text == "x"
