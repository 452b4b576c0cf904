# SPDX-License-Identifier: Apache-2.0
"""Ends an engine that is stuck, so that clients get an error instead of silence.

vLLM notices an engine process that has died, answers 503 on ``/health`` and exits; one that is
stopped, or blocked inside a device call, looks alive to it for ever. The API server therefore kills
an engine that shows no sign of life, or stays in one step, for longer than
``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``. What follows is vLLM's handling of a dead engine.
"""

import os
import signal
import threading
import time

from vllm.logger import init_logger

from rbln_vllm.metrics.counters import Counter, ProgramCounters

logger = init_logger("vllm.rbln.watchdog")
NANOSECONDS = 1_000_000_000


def stuck_reason(counters: ProgramCounters, now_ns: int, timeout_s: float) -> str | None:
    """Why the engine counts as stuck at ``now_ns`` (monotonic), or None."""
    limit = int(timeout_s * NANOSECONDS)
    busy_since, beat = counters[Counter.BUSY_SINCE], counters[Counter.BEAT]
    if busy_since and now_ns - busy_since > limit:
        return f"it has been in one step for more than {timeout_s:g} s"
    if beat and now_ns - beat > limit:
        return f"it has shown no sign of life for more than {timeout_s:g} s"
    return None


class Watchdog:
    """Looks at the engine's signs of life from a thread of the API server."""

    def __init__(self, counters: ProgramCounters, timeout_s: float) -> None:
        self._counters, self._timeout_s = counters, timeout_s

    def start(self) -> None:
        threading.Thread(target=self._run, name="rbln-watchdog", daemon=True).start()

    def _run(self) -> None:
        period = min(5.0, max(0.05, self._timeout_s / 4))
        while True:
            time.sleep(period)
            engine = self._counters[Counter.ENGINE_PID]
            if engine in (0, os.getpid()):
                continue
            reason = stuck_reason(self._counters, time.monotonic_ns(), self._timeout_s)
            if reason is not None:
                self._end(engine, reason)
                return

    def _end(self, engine: int, reason: str) -> None:
        logger.error(
            "The engine (process %d) is stuck: %s. It is killed; set "
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS to allow longer steps",
            engine,
            reason,
        )
        try:
            os.kill(engine, signal.SIGKILL)
        except ProcessLookupError:
            logger.info("The engine (process %d) had already ended", engine)
