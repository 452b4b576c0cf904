# SPDX-License-Identifier: Apache-2.0
"""Thousands of random commands; see fuzz.py. In a process of its own, since it may crash."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.host.native.commands import VALID

REPOSITORY = Path(__file__).parents[4]
SEED = 20260
CASES = 12000


@pytest.fixture(scope="module")
def outcomes() -> Counter[str]:
    """How many cases ended how."""
    module = "tests.unit.host.native.fuzz"
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", module, str(SEED), "0", str(CASES)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = finished.stderr.rpartition("\r")[2]
    assert finished.returncode == 0, f"exit {finished.returncode}: {said}"
    return Counter(json.loads(finished.stdout))


def test_nothing_leaves_its_memory(outcomes: Counter[str]) -> None:
    assert sum(outcomes.values()) == CASES


def test_every_refusal_names_the_operator(outcomes: Counter[str]) -> None:
    assert [outcome for outcome in outcomes if outcome.startswith("refused without")] == []


def test_many_of_each_kind_ran(outcomes: Counter[str]) -> None:
    """Otherwise nothing was tried."""
    assert outcomes["refused"] > CASES // 4
    assert outcomes["out of range"] > CASES // 100
    for op in VALID:
        assert outcomes[f"ran {op}"] > CASES // 300, op
