# SPDX-License-Identifier: Apache-2.0
"""The gate before an engine: a grammar that does not compile in time ends nobody else's request.

The check here is a stand-in that does what its regular expression names.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from rbln_vllm.grammars import gate
from rbln_vllm.grammars.fork_server import GIB, MEMORY_BYTES, Check, ForkServer
from rbln_vllm.grammars.gate import CHECKS_AT_ONCE, GrammarGate, gate_of

SECONDS = 0.5


def make_check() -> Check:
    """One that counts its calls would count in its own process: see ``answered``."""
    return check


def check(given: bytes) -> str:
    what = pickle.loads(given).regex
    if what.startswith("endless"):
        time.sleep(60)
    if what == "large":
        bytearray(MEMORY_BYTES + GIB)
    if what == "fault":
        raise KeyError(what)
    return what if what.startswith("wrong") else ""


def no_check() -> Check:
    raise ValueError("no tokenizer")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(make_check, SECONDS)
    yield server
    server.close()


@pytest.fixture
def grammars(server: ForkServer) -> GrammarGate:
    return GrammarGate(server, SECONDS)


def asking(regex: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))


def reason(grammars: GrammarGate, regex: str) -> str:
    """What a request with this grammar is answered; nothing when it is let in."""
    return asyncio.run(_reason(grammars, regex))


async def _reason(grammars: GrammarGate, regex: str) -> str:
    try:
        await grammars.admit(asking(regex))
    except VLLMValidationError as error:
        return str(error)
    return ""


def test_what_compiles_is_let_in_and_what_does_not_is_refused_in_words(
    grammars: GrammarGate,
) -> None:
    assert reason(grammars, "fine") == ""
    assert "wrong: there" in reason(grammars, "wrong: there")
    assert reason(grammars, "also fine") == ""


@pytest.mark.parametrize("what", ["endless", "large", "fault"])
def test_what_does_not_end_well_is_ended(grammars: GrammarGate, what: str) -> None:
    text = reason(grammars, what)
    assert "not compiled within 0.5 s and 2 GiB" in text
    assert "make it smaller" in text
    assert reason(grammars, "fine") == ""


def test_a_large_grammar_arrives_whole(grammars: GrammarGate) -> None:
    """Larger than what a socket takes at once."""
    long = "wrong" + "x" * 3_000_000
    assert len(reason(grammars, long)) >= len(long)


def test_the_event_loop_goes_on(grammars: GrammarGate) -> None:
    """Others are checked meanwhile, and everything else runs."""

    async def load() -> tuple[str, str, int]:
        endless = asyncio.create_task(_reason(grammars, "endless"))
        quick = await _reason(grammars, "fine")
        turns = 0
        while not endless.done():
            await asyncio.sleep(0.01)
            turns += 1
        return quick, await endless, turns

    quick, text, turns = asyncio.run(load())
    assert (quick, "not compiled" in text) == ("", True)
    assert turns > 3


def test_more_than_there_are_places_wait(grammars: GrammarGate) -> None:
    names = [f"endless {number}" for number in range(CHECKS_AT_ONCE + 1)]

    async def load() -> list[str]:
        return await asyncio.gather(*(_reason(grammars, name) for name in [*names, "fine"]))

    *texts, fine = asyncio.run(load())
    assert all("not compiled" in text for text in texts)
    assert fine == ""


def test_who_goes_away_gives_up_the_place(grammars: GrammarGate) -> None:
    async def load() -> None:
        for number in range(CHECKS_AT_ONCE + 2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(grammars.admit(asking(f"endless {number}")), 0.02)
        assert not grammars._places.locked()
        await grammars.admit(asking("fine"))

    asyncio.run(load())


def test_verdicts_are_remembered(grammars: GrammarGate, server: ForkServer) -> None:
    assert reason(grammars, "fine") == ""
    assert "wrong" in reason(grammars, "wrong")
    server.close()
    assert reason(grammars, "fine") == ""
    assert "wrong" in reason(grammars, "wrong")


def test_without_its_server_the_gate_is_open(grammars: GrammarGate, server: ForkServer) -> None:
    server.close()
    assert reason(grammars, "wrong") == ""


def test_where_no_check_can_be_made_the_gate_is_open() -> None:
    server = ForkServer(no_check, SECONDS)
    assert reason(GrammarGate(server, SECONDS), "wrong") == ""
    server.close()


def test_the_server_ends_with_its_gate() -> None:
    server = ForkServer(make_check, SECONDS)
    process = server._process
    server._orders.close()  # as when nobody holds it any more
    process.join(60)
    assert process.exitcode == 0


def test_ports_are_free_when_who_listened_is_gone(tmp_path: Path) -> None:
    """The server is forked from one that has its address already."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "address"))
        unix.listen()
        checks = ForkServer(make_check, SECONDS)
        grammars = GrammarGate(checks, SECONDS)
        assert "wrong" in reason(grammars, "wrong")
        address = listening.getsockname()
    socket.create_server(address).close()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(tmp_path / "address"))
    assert "wrong" in reason(grammars, "wrong, too")
    checks.close()


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(),
        SamplingParams(),
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)),
    ],
    ids=["pooling", "free", "any object"],
)
def test_what_needs_no_check(params: object) -> None:
    nobody: Any = SimpleNamespace()
    asyncio.run(GrammarGate(nobody, SECONDS).admit(params))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_what_nests_too_deep_is_left_to_vllm() -> None:
    nobody: Any = SimpleNamespace()
    schema = StructuredOutputsParams(json=nested(20_000))
    asyncio.run(GrammarGate(nobody, SECONDS).admit(SamplingParams(structured_outputs=schema)))


def config(backend: str = "auto", **model: Any) -> Any:
    model = {"skip_tokenizer_init": False, "runner_type": "generate", **model}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        structured_outputs_config=SimpleNamespace(backend=backend),
    )


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (config("guidance"), "5"),
        (config("outlines"), "5"),
        (config(skip_tokenizer_init=True), "5"),
        (config(runner_type="pooling"), "5"),
        (config(), "0"),
    ],
)
def test_who_has_no_gate(settings: Any, seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_GRAMMAR_SECONDS", seconds)
    assert gate_of(settings) is None


def test_vllms_engine_gets_requests_through_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Engine:
        def __init__(self, vllm_config: Any, executor: str) -> None:
            opened.append((vllm_config, executor))

        async def add_request(self, request_id: str, prompt: str, params: Any, more: int) -> str:
            return f"{request_id} {prompt} {params} {more}"

    class Gate:
        async def admit(self, params: Any) -> None:
            opened.append(params)

    monkeypatch.setattr(gate, "gate_of", lambda _config: Gate())
    gate.install(Engine)
    gate.install(Engine)
    engine = Engine("config", executor="one")
    answer = asyncio.run(engine.add_request("1", "text", "params", more=3))
    assert answer == "1 text params 3"
    assert opened == [("config", "one"), "params"]


def test_engines_get_schemas_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have no integers beyond 64 bits; what nests too deep stays as it is."""

    class Engine:
        def __init__(self, vllm_config: Any) -> None:
            pass

        async def add_request(self, request_id: str, prompt: str, params: Any) -> Any:
            return params.structured_outputs.json

    monkeypatch.setattr(gate, "gate_of", lambda _config: None)
    gate.install(Engine)
    engine = Engine("config")

    def handed_on(schema: dict[str, Any]) -> Any:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        return asyncio.run(engine.add_request("1", "text", params))

    assert handed_on({"maximum": 10**30}) == json.dumps({"maximum": 10**30})
    assert isinstance(handed_on(nested(20_000)), dict)
