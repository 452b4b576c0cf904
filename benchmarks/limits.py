# SPDX-License-Identifier: Apache-2.0
"""Measure what this machine can do at most, with a small C++ program built for it.

usage: python -m benchmarks.limits      prints read bandwidth and matrix rate on all allowed CPUs
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.costs import Limits
from benchmarks.paths import CACHE

SOURCE = Path(__file__).with_suffix(".cc")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-Wno-psabi")
SECONDS = 300


class NoLimitsError(RuntimeError):
    """The limits cannot be measured here; the text says why."""


class LimitsProgram:
    """The program, built once per source and CPU."""

    def __init__(self) -> None:
        """Raises NoLimitsError when there is no compiler, or when it fails."""
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise NoLimitsError("no C++ compiler (g++, clang++ or CXX): limits are not measured")
        self.path = CACHE / "bench" / f"limits-{_fingerprint(compiler)}"
        if not self.path.exists():
            self._build(compiler)

    def measure(self) -> dict[str, Any]:
        """read_gb_s, matrix_gflop_s, matrix_kind, threads. Takes about two seconds."""
        cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
        return _sample(json.loads(_run([str(self.path), *cpus])))

    def _build(self, compiler: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        _run([compiler, *FLAGS, str(SOURCE), "-o", str(scratch)])
        scratch.rename(self.path)


def best(samples: list[dict[str, Any]]) -> Limits:
    """The limits behind several samples: other work can only lower a sample."""
    return Limits(
        bytes_per_s=max(sample["read_gb_s"] for sample in samples) * 1e9,
        flop_per_s=max(sample["matrix_gflop_s"] for sample in samples) * 1e9,
    )


def _sample(figures: dict[str, Any]) -> dict[str, Any]:
    best([figures])  # refuses figures that are missing or nonsense
    return figures


def _fingerprint(compiler: str) -> str:
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line), ""
    )
    parts = (SOURCE.read_text(), compiler, cpu, *FLAGS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _run(command: list[str]) -> str:
    """Standard output. Raises NoLimitsError with what the command wrote."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLimitsError(f"limits are not measured: {error}") from error
    if done.returncode != 0:
        raise NoLimitsError(f"limits are not measured: {' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        print(json.dumps(LimitsProgram().measure(), indent=1))
    except NoLimitsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
