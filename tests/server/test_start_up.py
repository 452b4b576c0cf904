# SPDX-License-Identifier: Apache-2.0
"""Start-up: progress, the cache, what is refused, and what happens to a program that is missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest

from scripts.server_process import end_group, serve_command
from tests.oracle import hf_greedy
from tests.server.live import (
    MODEL,
    LiveServer,
    empty_cache_root,
    prompt,
    running_server,
    serve_arguments,
    server_environment,
    wait_until,
)
from tests.server_process import fetch, free_port

PROGRAMS = 17
DRY_RUN = "RBLN-CR03"
START_S = 180.0
"""What two starts at once may take on a busy machine."""


def compiled(log: str) -> list[tuple[int, int]]:
    """The k and n of every "Compiled k of n" line."""
    return [(int(k), int(n)) for k, n in re.findall(r"Compiled (\d+) of (\d+): ", log)]


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    return empty_cache_root(tmp_path / "cache")


def serve_to_the_end(
    arguments: list[str], cache_root: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`rbln-vllm serve` that is expected to end by itself: its exit code and all it wrote."""
    command = serve_command([*arguments, "--port", str(free_port())])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **server_environment(cache_root), **variables},
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        end_group(process)
    return subprocess.CompletedProcess(command, process.returncode, output)


def check_answers(server: LiveServer, model_dir: Path) -> None:
    asked = prompt(40)
    (expected,) = hf_greedy(model_dir, [asked], 8, ignore_eos=True)
    assert server.tokens(asked, 8) == expected.token_ids


def test_help_shows_our_options(cache_root: Path) -> None:
    shown = serve_to_the_end(["--help=rblnconfig"], cache_root)
    assert shown.returncode == 0
    for option in (
        "--rbln-max-prefill-run",
        "--rbln-strict-programs",
        "--rbln-require-precompiled",
    ):
        assert option in shown.stdout


def test_compile_only_on_a_dry_run_then_start_without_compiling(
    tiny_llama_dir: Path, cache_root: Path, tmp_path: Path
) -> None:
    """Prepare for a device on another machine: compile, exit 0, serve from what is there."""
    arguments = [str(tiny_llama_dir), "--dtype", "float32", "--served-model-name", MODEL]
    device = {"RBLN_FORCE_NPU_NAME": DRY_RUN}
    made = serve_to_the_end(arguments, cache_root, VLLM_RBLN_COMPILE_ONLY="1", **device)
    assert made.returncode == 0, made.stdout
    assert "Traceback" not in made.stdout
    assert len(re.findall(rf"Dry run of {DRY_RUN} ", made.stdout)) == 1
    steps = compiled(made.stdout)
    total = steps[-1][1]
    assert steps == [(k, total) for k in range(1, total + 1)]

    arguments.append("--rbln-require-precompiled")
    with running_server(arguments, tmp_path / "log", cache_root, **device) as server:
        check_answers(server, tiny_llama_dir)
        assert server.metrics()["rbln_programs"] == total
        log = server.process.log()
    assert compiled(log) == []
    assert f"Device {DRY_RUN}" in log
    assert "Building the model" not in log


def test_require_precompiled_names_what_is_missing(tiny_llama_dir: Path, cache_root: Path) -> None:
    arguments = [*serve_arguments(tiny_llama_dir), "--rbln-require-precompiled"]
    ended = serve_to_the_end(arguments, cache_root)
    assert ended.returncode not in (0, None)
    line = re.findall(r"ProgramsMissingError: (.*)", ended.stdout)[0]
    assert f"{PROGRAMS} programs are not in the compile cache at {cache_root}" in line
    for name in ("prefill_b1_q64", "decode_b1_q1", "decode_b4_q1", "logits_b64_q1"):
        assert name in line
    assert "VLLM_RBLN_COMPILE_ONLY=1" in line
    assert compiled(ended.stdout) == []


@contextmanager
def paused_compile(logs: Sequence[Path]) -> Iterator[Path]:
    """Stops the first engine that begins to compile while the block lasts; yields its log."""
    beginning = re.compile(r"EngineCore pid=(\d+).*Building the model to compile from")

    def engine_of(log: Path) -> int:
        found = beginning.search(log.read_text()) if log.exists() else None
        return int(found[1]) if found else 0

    wait_until(lambda: any(map(engine_of, logs)), "an engine that compiles", START_S)
    log = max(logs, key=engine_of)
    os.kill(engine_of(log), signal.SIGSTOP)
    try:
        yield log
    finally:
        os.kill(engine_of(log), signal.SIGCONT)


def test_two_at_once_compile_once(tiny_llama_dir: Path, cache_root: Path, tmp_path: Path) -> None:
    arguments = serve_arguments(tiny_llama_dir)
    logs = [tmp_path / "first", tmp_path / "second"]
    with ExitStack() as stack, ThreadPoolExecutor(max_workers=2) as pool:
        starts = [running_server(arguments, log, cache_root) for log in logs]
        servers = pool.map(stack.enter_context, starts)
        with paused_compile(logs) as first:
            (second,) = (log for log in logs if log != first)
            waits = "Another process is compiling"
            wait_until(lambda: waits in second.read_text(), "the second waiting", START_S)
        for server in servers:
            check_answers(server, tiny_llama_dir)
    assert compiled(first.read_text()) == [(k, PROGRAMS) for k in range(1, PROGRAMS + 1)]
    assert compiled(second.read_text()) == []


def test_strict_programs_refuse_requests_and_keep_the_engine(
    tiny_llama_dir: Path,
    cache_root: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = [*serve_arguments(tiny_llama_dir), "--rbln-strict-programs"]
    scratch = tmp_path_factory.mktemp("s")  # short, as the paths of sockets must be
    lazily = {"VLLM_RBLN_ENABLE_WARM_UP": "0", "TMPDIR": str(scratch)}
    with running_server(arguments, tmp_path / "log", cache_root, **lazily) as server:
        for count in (1, 2):
            with pytest.raises(openai.InternalServerError):
                server.complete(prompt(20), max_tokens=5)
            metrics = server.metrics()
            assert metrics["rbln_requests_refused_for_program_total"] == count
            assert metrics["rbln_programs_compiled_after_ready_total"] == 0
        with pytest.raises(openai.APIError):
            list(server.stream(prompt(20), max_tokens=5))
        server.wait_until_idle()
        fetch(f"{server.url}/health")
        log = server.process.log()
    assert "prefill_b1_q64" in log
    assert compiled(log) == []
    assert not list(scratch.glob("*.counters")), "a file outlived the server"
