# SPDX-License-Identifier: Apache-2.0
"""What starts and ends a server: progress, the curl line, signals, exit codes, no leftovers."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import server_process
from tests.server import fake_server
from tests.server.live import wait_until
from tests.server_process import ServerError, ServerProcess, free_port

FAKE = Path(fake_server.__file__)
SERVE = FAKE.parents[2] / "scripts" / "serve.py"


@pytest.fixture
def engine_pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the stand-in writes the id of its own child; both are gone after the test."""
    path = tmp_path / "engine.pid"
    monkeypatch.setenv("FAKE_ENGINE_PID", str(path))
    yield path
    if path.exists():
        pid = int(path.read_text())
        if not wait_gone(pid):
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the engine process outlived the server")


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server_process, "serve_command", lambda arguments: [sys.executable, str(FAKE), *arguments]
    )


@pytest.fixture
def fake_bin(tmp_path: Path) -> Path:
    """An interpreter beside a `rbln-vllm` that is the stand-in, as in a virtual environment."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "python").symlink_to(sys.executable)
    command = directory / "rbln-vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    command.chmod(0o755)
    return directory / "python"


def wait_gone(pid: int) -> bool:
    """Whether the process ends (a killed orphan takes a moment to be reaped)."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


class TestServerProcess:
    @pytest.mark.usefixtures("fake_serve")
    def test_serves_in_the_block_and_leaves_no_process(
        self, tmp_path: Path, engine_pid_file: Path
    ) -> None:
        lines: list[str] = []
        with ServerProcess(
            ["a-model"], log_file=tmp_path / "log", env={"A": "b"}, on_line=lines.append
        ) as server:
            assert server_process.is_healthy(server.url)
            assert engine_pid_file.exists()
        assert not server_process.is_healthy(server.url)
        assert lines[0] == "arguments ['a-model']"
        assert "told to stop by SIGTERM" in server.log()

    @pytest.mark.usefixtures("fake_serve", "engine_pid_file")
    def test_early_end_is_reported_with_the_log(self, tmp_path: Path) -> None:
        server = ServerProcess(["--fail"], log_file=tmp_path / "log")
        with pytest.raises(ServerError, match="could not load the model"), server:
            pytest.fail("a server that ended was taken for ready")

    @pytest.mark.usefixtures("fake_serve")
    def test_missed_deadline_ends_everything(
        self, tmp_path: Path, engine_pid_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(url: str) -> bool:
            wait_until(engine_pid_file.exists, "the engine process")
            return False

        monkeypatch.setattr(server_process, "is_healthy", never)

        server = ServerProcess([], log_file=tmp_path / "log", deadline=0.1)
        with pytest.raises(ServerError, match="not ready after 0 s"), server:
            pytest.fail("an unhealthy server was taken for ready")


class TestServeScript:
    @pytest.mark.parametrize(
        ("signum", "route"),
        [(signal.SIGINT, "/v1/chat/completions"), (signal.SIGTERM, "/v1/embeddings")],
    )
    @pytest.mark.usefixtures("engine_pid_file")
    def test_announces_forwards_and_returns_the_exit_code(
        self, fake_bin: Path, signum: signal.Signals, route: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The question is for a route that the server has."""
        monkeypatch.setenv("FAKE_ROUTE", route)
        port = free_port()
        options = ["a-model", "--port", str(port), "--max-model-len", "64"]
        command = [str(fake_bin), str(SERVE), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve:
            try:
                self.check(serve, f"http://127.0.0.1:{port}{route}", signum)
            finally:
                serve.terminate()

    def check(self, serve: subprocess.Popen[str], asked: str, signum: signal.Signals) -> None:
        assert serve.stdout is not None
        output = ""
        while "curl" not in output:
            line = serve.stdout.readline()
            assert line, f"ended before it was ready: {output}"
            output += line
        assert "arguments ['serve', 'a-model', '--max-model-len', '64']" in output
        words = shlex.split(output.splitlines()[-1])
        assert words[:2] == ["curl", asked]
        assert fake_server.MODEL in words[-1]
        serve.send_signal(signum)
        rest, _ = serve.communicate(timeout=60)
        assert signum.name in rest
        assert serve.returncode == fake_server.EXIT_CODE

    def test_port_in_use_is_said_before_anything_starts(
        self, fake_bin: Path, engine_pid_file: Path
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = subprocess.run(
                [fake_bin, SERVE, "a-model", "--port", str(port)],
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert f"port {port} is in use" in done.stderr
        assert "PORT=" in done.stderr
        assert not engine_pid_file.exists()
