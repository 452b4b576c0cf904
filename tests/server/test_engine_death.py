# SPDX-License-Identifier: Apache-2.0
"""A dead or stuck engine: clients hear of it, health says so, the server exits."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from tests.server.live import LiveServer, prompt, running_server, serve_arguments, wait_until
from tests.server_process import fetch

STUCK_AFTER_S = 8


@pytest.fixture
def own_server(tiny_llama_dir: Path, tmp_path: Path) -> Iterator[LiveServer]:
    """A server for the test to break."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [*serve_arguments(tiny_llama_dir), "--enable-server-load-tracking"]
    with running_server(
        arguments,
        tmp_path / "log",
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=str(STUCK_AFTER_S),
        TMPDIR=str(scratch),
    ) as server:
        assert list(scratch.glob("*.counters"))
        yield server
    assert not list(scratch.glob("*.counters")), "a file outlived the server"


def health(server: LiveServer) -> int | None:
    """The status of /health; None when nobody answers."""
    try:
        fetch(f"{server.url}/health", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
    return 200


def in_flight(server: LiveServer) -> int:
    """Requests the API server has received and not answered."""
    return int(json.loads(fetch(f"{server.url}/load"))["server_load"])


def check_breaks(server: LiveServer, break_it: Callable[[psutil.Process], None]) -> None:
    """After `break_it(engine)` clients get errors, health is not 200, and all processes end."""
    main, engine = server.process.process, server.engine()
    assert main is not None
    assert health(server) == 200
    stream = server.stream(prompt(21), max_tokens=230, ignore_eos=True)
    next(stream)
    engine.suspend()  # so that both requests are in flight for certain
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(server.complete, prompt(20), max_tokens=200, ignore_eos=True)
        wait_until(lambda: in_flight(server) == 2, "both requests received")
        break_it(engine)
        wait_until(lambda: health(server) != 200, "/health saying that the engine is dead")
        with pytest.raises(openai.InternalServerError, match="EngineCore encountered an issue"):
            waiting.result(timeout=60)
    with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
        list(stream)
    wait_until(lambda: main.poll() is not None, "the server's exit")
    wait_until(lambda: not engine.is_running(), "the engine's end")


def test_killed(own_server: LiveServer) -> None:
    check_breaks(own_server, psutil.Process.kill)
    assert "EngineDeadError" in own_server.process.log()


def test_stuck(own_server: LiveServer) -> None:
    check_breaks(own_server, lambda engine: None)  # it stays stopped
    log = own_server.process.log()
    assert re.search(rf"The engine \(process \d+\) is stuck: it has .* {STUCK_AFTER_S} s", log)
    assert "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" in log
