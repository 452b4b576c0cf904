# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of ours or of vLLM's CPU backend, stopped while it is not measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.drivers import START_SECONDS, EngineError, end_stopped_group, log_tail
from benchmarks.engines.protocol import Settings
from benchmarks.measure import Notes
from benchmarks.paths import LOGS, ROOT
from benchmarks.systems import OURS, SYSTEMS, System
from scripts.server_process import LOCALHOST, free_port, is_healthy

# What our platform logs at every start, and no other does.
OUR_PLATFORM = "RBLN config:"


class Server:
    """`vllm serve` for the time of a `with` block. Raises EngineError."""

    def __init__(
        self,
        system: System,
        settings: Settings,
        arguments: Sequence[str] = ("--no-enable-prefix-caching",),
        log_name: str = "",
    ) -> None:
        self.system = system
        self.settings = settings
        self.arguments = tuple(arguments)
        self.url = f"http://{LOCALHOST}:{free_port()}"
        self.log_file: Path = LOGS / f"server-{log_name or system.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("w") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=ROOT,
                env=self.system.process_variables(self.settings.kv_gib),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(self._process)
            self._check_platform()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it may run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _command(self) -> list[str]:
        settings = self.settings
        return [
            *[sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.model],
            *["--dtype", "bfloat16", *self.arguments],
            *["--max-model-len", str(settings.max_model_len)],
            *["--max-num-seqs", str(settings.max_num_seqs)],
            *["--host", LOCALHOST, "--port", self.url.rpartition(":")[2]],
        ]

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_SECONDS
        while not is_healthy(self.url):
            if process.poll() is not None:
                raise EngineError(
                    f"{self.system.label}: the server has ended\n{log_tail(self.log_file)}"
                )
            if time.monotonic() > end:
                raise EngineError(
                    f"{self.system.label}: not ready after {START_SECONDS:.0f} s\n"
                    f"{log_tail(self.log_file)}"
                )
            time.sleep(0.2)

    def _check_platform(self) -> None:
        """A server that runs on the other's platform would be measured under a false name."""
        is_ours = OUR_PLATFORM in self.log_file.read_text(errors="replace")
        if is_ours != (self.system.name == OURS):
            raise self._error("runs on another platform")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, number)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        end_stopped_group(process)

    def _error(self, what: str) -> EngineError:
        return EngineError(f"the server of {self.system.label} {what}\n{log_tail(self.log_file)}")


class Servable(Protocol):
    """What a benchmark compares: a system and the arguments of its server."""

    @property
    def label(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def server_arguments(self) -> tuple[str, ...]: ...


@contextlib.contextmanager
def started(
    chosen: Mapping[str, Servable], settings: Settings, prefix: str, notes: Notes
) -> Iterator[dict[str, Server]]:
    """A server for each, by its name; what cannot start is left out with a note.

    `prefix` begins the names of their logs.
    """
    with contextlib.ExitStack() as stack:
        alive: dict[str, Server] = {}
        for name, one in chosen.items():
            server = Server(SYSTEMS[one.system], settings, one.server_arguments, f"{prefix}-{name}")
            try:
                alive[name] = stack.enter_context(server)
            except EngineError as error:
                notes.add(f"{one.label} is left out: {error}")
            else:
                print(f"started: {one.label}", flush=True)
        yield alive
