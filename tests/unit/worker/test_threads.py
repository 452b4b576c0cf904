# SPDX-License-Identifier: Apache-2.0
"""Threads follow the allowed CPU set and the container's quota (report D20)."""

import os
from pathlib import Path

import pytest

from rbln_vllm.worker.threads import allowed_threads, cpu_quota


def quota(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000", None),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("nonsense", None),
        ("", None),
        ("100000 0", None),
    ],
)
def test_quota(tmp_path: Path, text: str, cpus: int | None) -> None:
    assert cpu_quota(quota(tmp_path, text)) == cpus


def test_no_quota_file(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "missing") is None


def test_threads_stay_inside_the_allowed_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 5, 6, 7})
    assert allowed_threads(tmp_path / "missing") == 4
    assert allowed_threads(quota(tmp_path, "200000 100000")) == 2
    assert allowed_threads(quota(tmp_path, "900000 100000")) == 4
