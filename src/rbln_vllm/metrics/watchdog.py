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


class Stillness:
    """How long a value has stayed the same, in time that was seen to pass."""

    def __init__(self) -> None:
        self._value, self._still_ns = 0, 0

    def after(self, elapsed_ns: int, value: int) -> int:
        """Nanoseconds for which it has been ``value``; 0 is no value and stays still for none."""
        same = value == self._value and value != 0
        self._still_ns = self._still_ns + elapsed_ns if same else 0
        self._value = value
        return self._still_ns


class Vigil:
    """What the engine's signs of life come to, look after look.

    Time is added up from look to look, each at most ``longest_look_s``: when all processes were
    stopped together (a paused container, SIGSTOP to the group), the engine was not silent, and gets
    its time to go on.
    """

    def __init__(self, timeout_s: float, longest_look_s: float) -> None:
        self._timeout_s, self._longest_ns = timeout_s, int(longest_look_s * NANOSECONDS)
        self._step, self._beat = Stillness(), Stillness()

    def stuck_reason(self, counters: ProgramCounters, elapsed_s: float) -> str | None:
        """Why the engine counts as stuck ``elapsed_s`` after the look before, or None."""
        elapsed_ns = min(int(elapsed_s * NANOSECONDS), self._longest_ns)
        limit_ns = int(self._timeout_s * NANOSECONDS)
        in_step_ns = self._step.after(elapsed_ns, counters[Counter.BUSY_SINCE])
        silent_ns = self._beat.after(elapsed_ns, counters[Counter.BEAT])
        if in_step_ns > limit_ns:
            return f"it has been in one step for more than {self._timeout_s:g} s"
        if silent_ns > limit_ns:
            return f"it has shown no sign of life for more than {self._timeout_s:g} s"
        return None


class Watchdog:
    """Looks at the engine's signs of life from a thread of the API server."""

    def __init__(self, counters: ProgramCounters, timeout_s: float) -> None:
        self._counters, self._timeout_s = counters, timeout_s

    def start(self) -> None:
        threading.Thread(target=self._run, name="rbln-watchdog", daemon=True).start()

    def _run(self) -> None:
        period = min(5.0, max(0.05, self._timeout_s / 4))
        vigil, looked = Vigil(self._timeout_s, 2 * period), time.monotonic()
        while True:
            time.sleep(period)
            now = time.monotonic()
            elapsed, looked = now - looked, now
            engine = self._counters[Counter.ENGINE_PID]
            if engine in (0, os.getpid()):
                continue
            reason = vigil.stuck_reason(self._counters, elapsed)
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
