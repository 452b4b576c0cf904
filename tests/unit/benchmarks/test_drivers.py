# SPDX-License-Identifier: Apache-2.0
"""The benchmark's care for the processes it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import drivers
from benchmarks.drivers import Driver, EngineError
from benchmarks.engines.protocol import Settings
from benchmarks.systems import System

CHILD = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def answer(**content): print(json.dumps(content), flush=True)
answer(ready=True, child=child.pid)
for line in sys.stdin:
    command = json.loads(line)
    if command["command"] == "die":
        print("reason of death", file=sys.stderr)
        sys.exit(3)
    if command["command"] == "answer":
        answer(got=command["value"])
"""


@dataclass(frozen=True)
class ScriptSystem(System):
    """A system whose driver is a script given here."""

    script: str = CHILD

    def command(self, settings: str) -> list[str]:
        return [sys.executable, "-S", "-c", self.script]


def state(pid: int) -> str:
    """One letter as in ps, or nothing when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for_state(pid: int, *expected: str) -> None:
    """Wait until it is in one of these states."""
    end = time.monotonic() + 60
    while (found := state(pid)) not in expected:
        assert time.monotonic() < end, f"process {pid} is {found!r}, not one of {expected}"
        time.sleep(0.005)


class TestDriver:
    @pytest.fixture
    def driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
        monkeypatch.setattr(drivers, "LOGS", tmp_path)
        system = ScriptSystem("script", "Script", "ours", "hf")
        return Driver(system, Settings("m", 1, 1, 1), seconds=60)

    def test_engine_is_stopped_while_it_is_not_asked(self, driver: Driver) -> None:
        with driver:
            child = driver.about["child"]
            wait_for_state(child, "T")
            assert driver.ask("answer", value=7) == {"got": 7}
            driver.send("wait")
            wait_for_state(child, "S")
        wait_for_state(child, "", "Z")

    def test_answer_that_does_not_come(self, driver: Driver) -> None:
        with driver:
            driver.send("wait")
            with pytest.raises(EngineError, match="Script has given no answer for 0 s"):
                driver.receive(0.05)

    def test_driver_that_dies_tells_why_and_leaves_nobody(self, driver: Driver) -> None:
        with driver:
            child = driver.about["child"]
            with pytest.raises(EngineError, match="Script has ended\nreason of death"):
                driver.ask("die")
        wait_for_state(child, "", "Z")

    def test_memory_counts_the_whole_group(self, driver: Driver) -> None:
        with driver:
            assert driver.about["memory_mib"] > 0


def test_group_that_ignores_its_end_is_killed() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    drivers.end_stopped_group(process, grace=0.05)
    assert process.returncode == -signal.SIGKILL
