# SPDX-License-Identifier: Apache-2.0
"""Signs of life of the engine process, for the API server's watchdog."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rbln_vllm.metrics.counters import Counter, ProgramCounters

PERIOD_S = 1.0


class Heartbeat:
    """Writes the time once a second from a thread, and when a step began."""

    def __init__(self, counters: ProgramCounters) -> None:
        self._counters = counters
        self._stopped = threading.Event()

    def start(self) -> None:
        self._counters.set(Counter.ENGINE_PID, os.getpid())
        self._beat()
        threading.Thread(target=self._run, name="rbln-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Say nothing more; the engine is leaving on purpose."""
        self._stopped.set()
        self._counters.set(Counter.ENGINE_PID, 0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The engine is inside a step for as long as this is."""
        self._counters.set(Counter.BUSY_SINCE, time.monotonic_ns())
        try:
            yield
        finally:
            self._counters.set(Counter.BUSY_SINCE, 0)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._beat()

    def _beat(self) -> None:
        self._counters.set(Counter.BEAT, time.monotonic_ns())
