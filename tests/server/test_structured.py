# SPDX-License-Identifier: Apache-2.0
"""Structured output obeys its grammar; a bad grammar is refused and harms nobody."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.live import CHUNK, MODEL, LiveServer, joined_text, prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["count", "colour"],
    "additionalProperties": False,
}
# The tiny model puts as much white space into JSON as it may.
REGEX = "[a-c]{3}-[0-9]{2}"


def structured(server: LiveServer, length: int = 10, seed: int = 0, **constraint: Any) -> str:
    completion = server.complete(
        prompt(length, seed), max_tokens=150, structured_outputs=constraint
    )
    assert completion.choices[0].finish_reason == "stop"
    return completion.choices[0].text


def test_regex(server: LiveServer) -> None:
    assert re.fullmatch(REGEX, structured(server, regex=REGEX))


def test_choice(server: LiveServer) -> None:
    assert structured(server, choice=["positive", "negative"]) in ("positive", "negative")


def test_json_schema_in_a_chat(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        },
        extra_body={"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"count", "colour"}
    assert found["count"] in range(10)
    assert found["colour"] in ("red", "blue")


def test_streamed(server: LiveServer) -> None:
    chunks = server.stream(prompt(10), max_tokens=50, structured_outputs={"regex": REGEX})
    assert re.fullmatch(REGEX, joined_text(list(chunks)))


def test_several_grammars_at_once_on_prompts_of_several_chunks(server: LiveServer) -> None:
    """Each output obeys its own grammar, and free requests beside them obey none."""
    free = server.tokens(prompt(2 * CHUNK + 9, seed=9), 12)
    patterns = [f"{letter}{{2}}[0-9]{{{size}}}" for size, letter in enumerate("pqrst", start=1)]

    def ask(number: int) -> object:
        if number == len(patterns):
            return server.tokens(prompt(2 * CHUNK + 9, seed=9), 12)
        return structured(server, 2 * CHUNK + number, number, regex=patterns[number])

    with ThreadPoolExecutor(max_workers=6) as pool:
        *texts, beside = pool.map(ask, range(len(patterns) + 1))
    assert all(re.fullmatch(*pair) for pair in zip(patterns, map(str, texts), strict=True))
    assert beside == free


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#/$defs/missing"}},
        {"json": "{"},
        {"regex": "[a-"},
        {"regex": "(a"},
        {"choice": []},
        {"grammar": "root ::= undefined_rule"},
        {"json": {"type": "integer", "minimum": 10**30}},
        {"json": {"$ref": "#"}},
        {"regex": "a\x00"},
    ],
    ids=str,
)
def test_bad_grammars_are_refused(server: LiveServer, constraint: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        server.complete(prompt(10), max_tokens=10, structured_outputs=constraint)
    assert re.fullmatch(REGEX, structured(server, regex=REGEX)), "a good one after a bad one"


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 20}, (7, 14)),
        ({"type": "integer", "minimum": 8, "maximum": 10**30}, range(8, 10**9)),
    ],
    ids=["of 7", "beyond 64 bits"],
)
def test_what_only_the_other_backend_can(
    server: LiveServer, schema: dict[str, Any], values: Any
) -> None:
    """Guidance obeys these schemas, also after and before xgrammar served others."""
    assert re.fullmatch(REGEX, structured(server, regex=REGEX))
    asked = {"json": schema}
    answer = server.complete(prompt(10), max_tokens=3, structured_outputs=asked)
    assert int(answer.choices[0].text) in values
    assert re.fullmatch(REGEX, structured(server, regex=REGEX))


LONG = [f"{number:05d}" + "xy" * 200 for number in range(6000)]
EXPLOSIVE: dict[str, dict[str, Any]] = {
    "schema": {"json": {"enum": LONG}},
    "choice": {"choice": LONG},
}


def test_grammars_that_take_too_long_are_refused(server: LiveServer) -> None:
    """Before the engine has them; others are served meanwhile."""

    def ask(name: str) -> str:
        try:
            server.complete(prompt(10), max_tokens=10, structured_outputs=EXPLOSIVE[name])
        except openai.BadRequestError as error:
            return str(error)
        return "answered"

    structured(server, regex=REGEX)  # compiled, so that it needs no place among the checks
    with ThreadPoolExecutor(len(EXPLOSIVE)) as pool:
        refusals = [pool.submit(ask, name) for name in EXPLOSIVE]
        assert re.fullmatch(REGEX, structured(server, regex=REGEX))
        assert len(server.tokens(prompt(10), 20)) == 20
        assert not any(refusal.done() for refusal in refusals)
        metrics = server.metrics()
        assert (metrics.running, metrics.waiting) == (0, 0), "the engine has them"
        texts = [refusal.result() for refusal in refusals]
    assert all("not compiled within 4 s" in text for text in texts), texts
    assert ask(next(iter(EXPLOSIVE))) == texts[0], "remembered"
    assert structured(server, choice=["positive", "negative"]) in ("positive", "negative")


def test_refused_in_a_stream(server: LiveServer) -> None:
    """The response has begun by then; it ends with the error."""
    with pytest.raises(openai.APIError, match="not compiled within 4 s"):
        list(server.stream(prompt(10), max_tokens=10, structured_outputs=EXPLOSIVE["schema"]))
