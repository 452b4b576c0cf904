# SPDX-License-Identifier: Apache-2.0
"""Counters written by one opener of the file are read by another."""

from pathlib import Path

from rbln_vllm.metrics.counters import Counter, ProgramCounters


def test_two_openers_share_the_numbers(tmp_path: Path) -> None:
    worker = ProgramCounters.create(tmp_path / "counters")
    worker.set_total(9)
    server = ProgramCounters.create(tmp_path / "counters")
    worker.add_late()
    worker.add_late()
    worker.add_refused(3)
    assert server[Counter.TOTAL] == 9
    assert server[Counter.COMPILED_AFTER_READY] == 2
    assert server[Counter.REFUSED] == 3


def test_in_memory_starts_at_zero() -> None:
    counters = ProgramCounters.in_memory()
    assert all(counters[counter] == 0 for counter in Counter)
