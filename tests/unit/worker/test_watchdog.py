# SPDX-License-Identifier: Apache-2.0
"""A stuck engine is told from a slow or an idle one (report D45)."""

import subprocess
import sys
import time

import pytest

from rbln_vllm.metrics.counters import Counter, ProgramCounters
from rbln_vllm.metrics.watchdog import NANOSECONDS, Watchdog, stuck_reason
from rbln_vllm.worker.heartbeat import Heartbeat

NOW = 1_000 * NANOSECONDS


@pytest.mark.parametrize(
    ("busy_for", "silent_for", "words"),
    [
        (None, 0, None),
        (None, 9, None),
        (None, 11, "no sign of life"),
        (9, 0, None),
        (11, 0, "in one step"),
        (11, 11, "in one step"),
    ],
)
def test_what_counts_as_stuck(busy_for: int | None, silent_for: int, words: str | None) -> None:
    counters = ProgramCounters.in_memory()
    counters.set(Counter.BEAT, NOW - silent_for * NANOSECONDS)
    if busy_for is not None:
        counters.set(Counter.BUSY_SINCE, NOW - busy_for * NANOSECONDS)
    reason = stuck_reason(counters, NOW, 10)
    assert reason is None if words is None else reason is not None and words in reason


def test_an_engine_that_has_not_started_is_not_stuck() -> None:
    assert stuck_reason(ProgramCounters.in_memory(), NOW, 10) is None


def test_a_step_is_marked_and_unmarked_even_when_it_fails() -> None:
    counters = ProgramCounters.in_memory()
    heartbeat = Heartbeat(counters)

    def failing_step() -> None:
        with heartbeat.step():
            assert counters[Counter.BUSY_SINCE] > 0
            raise RuntimeError("step")

    with pytest.raises(RuntimeError, match="step"):
        failing_step()
    assert counters[Counter.BUSY_SINCE] == 0


def test_the_watchdog_kills_a_stuck_process_and_only_then() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        counters = ProgramCounters.in_memory()
        counters.set(Counter.ENGINE_PID, process.pid)
        counters.set(Counter.BEAT, time.monotonic_ns())
        Watchdog(counters, timeout_s=0.4).start()
        assert process.wait(timeout=20) == -9
    finally:
        process.kill()
