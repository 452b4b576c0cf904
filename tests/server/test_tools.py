# SPDX-License-Identifier: Apache-2.0
"""vLLM's tool and reasoning parsers on what the model emits, which a grammar decides here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.models import VOCAB_SIZE
from tests.server.live import MODEL, LiveServer, running_server, serve_arguments

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
"""Of others vLLM lets any JSON pass as arguments."""
STRUCTURED = {"backend": "xgrammar", "disable_any_whitespace": True, "enable_in_reasoning": True}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"day": [1-7]\}\}\n</tool_call>'
THOUGHT = "Here is my thought process: [a-m]{6} Here is my response: [n-z]{6}"


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    parsers += ["--reasoning-parser", "granite"]
    parsers += ["--structured-outputs-config", json.dumps(STRUCTURED)]
    log_file = tmp_path_factory.mktemp("tools") / "log"
    with running_server([*serve_arguments(tiny_llama_dir), *parsers], log_file) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def no_space(tiny_llama_dir: Path) -> dict[str, float]:
    """A bias against white space, of which the tiny model writes all that a grammar allows."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    return {str(i): -100.0 for i in range(VOCAB_SIZE) if tokenizer.decode([i]).isspace()}


def chat(server: LiveServer, regex: str | None = None, **more: Any) -> Any:
    constraint = {"structured_outputs": {"regex": regex}} if regex else {}
    return server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=100,
        temperature=0,
        extra_body=constraint,
        **more,
    )


def check_call(call: Any) -> None:
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"day"}
    assert arguments["day"] in range(1, 8)


def test_a_named_tool(server: LiveServer, no_space: dict[str, float]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat(server, tools=[STRICT], tool_choice=choice, logit_bias=no_space)
    (call,) = answer.choices[0].message.tool_calls
    check_call(call)


def test_some_tool_required(server: LiveServer, no_space: dict[str, float]) -> None:
    answer = chat(server, tools=[STRICT], tool_choice="required", logit_bias=no_space)
    assert answer.choices[0].message.tool_calls
    for call in answer.choices[0].message.tool_calls:
        check_call(call)


def test_a_call_in_the_text(server: LiveServer) -> None:
    """What a model of the Hermes family writes when it decides for a tool by itself."""
    answer = chat(server, CALL, tools=[WEATHER], tool_choice="auto")
    (call,) = answer.choices[0].message.tool_calls
    check_call(call)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_reasoning(server: LiveServer) -> None:
    message = chat(server, THOUGHT).choices[0].message
    assert re.fullmatch("[n-z]{6}", message.content.strip())
    assert re.fullmatch("[a-m]{6}", message.model_extra["reasoning"].strip())


def test_reasoning_streamed(server: LiveServer) -> None:
    content, reasoning = "", ""
    for chunk in chat(server, THOUGHT, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
    assert re.fullmatch("[n-z]{6}", content.strip())
    assert re.match("[a-m]{6}", reasoning.strip())  # the parser learns late where it ends
