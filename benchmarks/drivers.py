# SPDX-License-Identifier: Apache-2.0
"""Start the driver of a system, ask it, stop it while others are measured, end all of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.protocol import Settings
from benchmarks.paths import LOGS, ROOT
from benchmarks.systems import System

START_SECONDS = 900.0
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.2
LOG_LINES = 12


class EngineError(RuntimeError):
    """A driver failed, ended or took too long; the text ends with its last log lines."""


class Driver:
    """One system's engine, for the time of a `with` block.

    Entering starts it and waits until it is ready; it is then stopped (SIGSTOP) whenever it is
    not answering. Leaving ends its whole process group. Raises EngineError.
    """

    def __init__(
        self,
        system: System,
        settings: Settings,
        *,
        seconds: float,
        compile_cache: Path | None = None,
        log_name: str = "",
    ) -> None:
        """`seconds` is how long one answer may take."""
        self.system = system
        self.settings = settings
        self.about: dict[str, Any] = {}
        self.log_file = LOGS / f"{log_name or system.name}.log"
        self._seconds = seconds
        self._compile_cache = compile_cache
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __enter__(self) -> Driver:
        began = time.perf_counter()
        self._process = self._spawn()
        try:
            ready = self.receive(START_SECONDS)
            self.about = {
                **ready,
                "ready_seconds": time.perf_counter() - began,
                "memory_mib": self.memory_mib(),
            }
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command of `engines.protocol`."""
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        """Let the engine work; `receive` fetches the answer."""
        process = self._running()
        self._signal(signal.SIGCONT)
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            os.write(process.stdin.fileno(), line.encode())  # type: ignore[union-attr]
        except BrokenPipeError as error:
            raise self._error("has ended") from error

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next answer; the engine is stopped again when it is there."""
        limit = self._seconds if seconds is None else seconds
        answer: dict[str, Any] = json.loads(self._read_line(limit))
        self._signal(signal.SIGSTOP)
        return answer

    def memory_mib(self) -> int:
        """Memory of all its processes now, see `group_memory_mib`."""
        return group_memory_mib(self._running().pid)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("w") as log:
            return subprocess.Popen(
                self.system.command(self.settings.to_json()),
                cwd=ROOT,
                env=self.system.process_variables(self.settings.kv_gib, self._compile_cache),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineError(f"{self.system.label} is not started: use `with`")
        return self._process

    def _read_line(self, seconds: float) -> str:
        source = self._running().stdout
        assert source is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            # A driver that died can leave processes that hold its output open: ask for it itself.
            has_ended = self._running().poll() is not None
            readable, _, _ = select.select([source], [], [], 0.0 if has_ended else POLL_SECONDS)
            piece = os.read(source.fileno(), 65536) if readable else b""
            self._unread += piece
            if not piece and (readable or has_ended):
                raise self._error("has ended")
            if not piece and time.monotonic() > end:
                raise self._error(f"has given no answer for {seconds:.0f} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running().pid, number)

    def _end(self) -> None:
        """Close its input, which ends a healthy driver; then kill what is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        end_stopped_group(process)

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.system.label} {what}\n{log_tail(self.log_file)}")


def log_tail(log_file: Path) -> str:
    """The last lines of a log, and where all of it is."""
    lines = log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([*lines, f"(all of it: {os.path.relpath(log_file, ROOT)})"])


def end_stopped_group(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """Let a group run on, wait up to `grace` seconds for its leader, then kill all of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_memory_mib(group: int) -> int:
    """Memory of all processes of a group in MiB; what several share is counted once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                total += pss_kib((folder / "smaps_rollup").read_text())
    return total // 1024


def pss_kib(smaps_rollup: str) -> int:
    """The proportional set size in the text of `/proc/PID/smaps_rollup`; 0 without one."""
    for line in smaps_rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0
