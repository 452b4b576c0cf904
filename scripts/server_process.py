# SPDX-License-Identifier: Apache-2.0
"""Start `rbln-vllm serve` as a child with a process group of its own, watch it, and end all of it.

Standard library only. An engine has processes of its own, which outlive the server when that is
killed: so whatever is started here is ended as a group.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOCALHOST = "127.0.0.1"
# Requests to this machine must not go through a proxy named in the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server ended or did not become ready; the text ends with its last log lines."""


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command line of `rbln-vllm serve` in the environment of this interpreter."""
    return [str(Path(sys.executable).parent / "rbln-vllm"), "serve", *arguments]


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind((LOCALHOST, 0))
        return int(sock.getsockname()[1])


def port_problem(port: int) -> str | None:
    """Why a server cannot listen on `port`, in words, or None."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use"
            return f"port {port} cannot be used: {error.strerror}"
    return None


def fetch(url: str, headers: Mapping[str, str] | None = None, timeout: float = 10.0) -> bytes:
    """The body of a GET request that goes through no proxy. Raises `OSError` when it fails."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    with _OPENER.open(request, timeout=timeout) as response:
        return bytes(response.read())


def is_healthy(url: str) -> bool:
    """Whether `/health` of the server at `url` answers with success within two seconds."""
    try:
        fetch(f"{url}/health", timeout=2)
    except (OSError, http.client.HTTPException):
        return False
    return True


def end_group(process: subprocess.Popen[str], grace: float = 20.0) -> None:
    """Ask the child to stop, wait up to `grace` seconds, then kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class ServerProcess:
    """A server for the time of a `with` block.

    Entering starts it and returns when `/health` answers; its output goes to `log_file`. Leaving
    ends its whole process group. Raises `ServerError` when it exits first or misses the deadline.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        deadline: float = 300.0,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`arguments` are those of `rbln-vllm serve` without the port; `env` adds to this
        process's environment; `on_line` is called with each log line until the server is ready."""
        self.port = port or free_port()
        self.url = f"http://{LOCALHOST}:{self.port}"
        self.log_file = log_file
        self.process: subprocess.Popen[str] | None = None
        self._command = self.command([*arguments, "--port", str(self.port)])
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._deadline = deadline
        self._on_line = on_line

    def __enter__(self) -> ServerProcess:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                text=True,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self.process)
        except BaseException:
            end_group(self.process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            end_group(self.process)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line; a subclass starts another server that answers `/health`."""
        return serve_command(arguments)

    def log(self) -> str:
        """Everything the server has written so far."""
        return self.log_file.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + self._deadline
        with self.log_file.open(errors="replace") as log:
            while not is_healthy(self.url):
                self._report_lines(log.readlines())
                if process.poll() is not None:
                    raise ServerError(
                        f"the server ended with {process.returncode}\n{self.log_tail()}"
                    )
                if time.monotonic() > end:
                    raise ServerError(
                        f"the server was not ready after {self._deadline:.0f} s\n{self.log_tail()}"
                    )
                time.sleep(0.2)
            self._report_lines(log.readlines())

    def _report_lines(self, lines: list[str]) -> None:
        if self._on_line is not None:
            for line in lines:
                self._on_line(line.rstrip("\n"))
