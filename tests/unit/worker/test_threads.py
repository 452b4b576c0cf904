# SPDX-License-Identifier: Apache-2.0
"""Threads follow the allowed CPU set and the container's quota."""

import os
from pathlib import Path

import pytest

from rbln_vllm.worker.threads import allowed_cpus, cpu_quota


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


def cores(tmp_path: Path, siblings: dict[int, str]) -> Path:
    """The kernel's files that say which CPUs are threads of one core."""
    for cpu, text in siblings.items():
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{text}\n")
    return tmp_path


class TestAllowedCpus:
    @pytest.fixture(autouse=True)
    def allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {7, 4, 5, 6})

    def test_are_the_allowed_set_cut_to_the_quota(self, tmp_path: Path) -> None:
        topology = tmp_path / "unknown"
        assert allowed_cpus(tmp_path / "missing", topology) == (4, 5, 6, 7)
        assert allowed_cpus(quota(tmp_path, "200000 100000"), topology) == (4, 5)
        assert allowed_cpus(quota(tmp_path, "900000 100000"), topology) == (4, 5, 6, 7)
        assert allowed_cpus(quota(tmp_path, "0 100000"), topology) == (4,)

    def test_one_of_each_core(self, tmp_path: Path) -> None:
        nothing = tmp_path / "missing"
        pairs = cores(tmp_path / "pairs", {4: "4-5", 5: "4-5", 6: "6-7", 7: "6-7"})
        assert allowed_cpus(nothing, pairs) == (4, 6)
        # The other thread of each core is one that this process may not use.
        apart = cores(tmp_path / "apart", {n: f"{n - 4},{n}" for n in (4, 5, 6, 7)})
        assert allowed_cpus(nothing, apart) == (4, 5, 6, 7)

    def test_quota_counts_after_cores(self, tmp_path: Path) -> None:
        pairs = cores(tmp_path / "pairs", {4: "4-5", 5: "4-5", 6: "6-7", 7: "6-7"})
        assert allowed_cpus(quota(tmp_path, "300000 100000"), pairs) == (4, 6)
        assert allowed_cpus(quota(tmp_path, "100000 100000"), pairs) == (4,)
