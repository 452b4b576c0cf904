# SPDX-License-Identifier: Apache-2.0
"""A stuck engine is told from a slow or an idle one."""

import subprocess
import sys
import time

import pytest

from rbln_vllm.metrics.counters import Counter, ProgramCounters
from rbln_vllm.metrics.watchdog import Vigil, Watchdog
from rbln_vllm.worker.heartbeat import Heartbeat

in_memory = ProgramCounters.in_memory

STEP, BEAT = 7, 9  # any values: only whether they change matters


def reason_after(looks: list[tuple[float, int, int]]) -> str | None:
    """The last verdict after looks of (seconds since the last, busy since, beat)."""
    vigil, counters, reason = Vigil(timeout_s=10, longest_look_s=4), in_memory(), None
    for elapsed, step, beat in looks:
        counters.set(Counter.BUSY_SINCE, step)
        counters.set(Counter.BEAT, beat)
        reason = vigil.stuck_reason(counters, elapsed)
    return reason


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ([(2, 0, beat) for beat in range(1, 20)], None),  # idle, alive
        ([(2, STEP, beat) for beat in range(1, 7)], None),  # 10 s in one step, not more
        ([(2, STEP, beat) for beat in range(1, 8)], "in one step"),
        ([(2, step, step) for step in range(1, 20)], None),  # one step after another
        ([(2, 0, BEAT)] * 6, None),  # 10 s of silence, not more
        ([(2, 0, BEAT)] * 7, "no sign of life"),
        ([(2, STEP, BEAT)] * 7, "in one step"),
        ([(2, 0, BEAT)] * 5 + [(2, 0, BEAT + 1)] * 6, None),
        ([(2, 0, 0)] * 20, None),  # not started
    ],
)
def test_what_counts_as_stuck(looks: list[tuple[float, int, int]], words: str | None) -> None:
    reason = reason_after(looks)
    assert reason is None if words is None else reason is not None and words in reason


def test_time_in_which_all_processes_were_stopped_is_not_held_against_the_engine() -> None:
    before, stopped = [(2.0, STEP, BEAT)] * 3, (500.0, STEP, BEAT)
    assert reason_after([*before, stopped]) is None
    assert reason_after([*before, stopped, (2.0, STEP, BEAT)]) is None
    assert reason_after([*before, stopped, *[(2.0, STEP, BEAT)] * 2]) is not None


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
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        counters = ProgramCounters.in_memory()
        counters.set(Counter.ENGINE_PID, process.pid)
        counters.set(Counter.BEAT, time.monotonic_ns())
        Watchdog(counters, timeout_s=0.4).start()
        assert process.wait(timeout=60) == -9
    finally:
        process.kill()
