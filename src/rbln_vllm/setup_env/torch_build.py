# SPDX-License-Identifier: Apache-2.0
"""Is the installed torch a CPU build, and do its companions load beside it?

Everything is tried in a process of its own: a broken extension may end the process that loads it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

CPU_WHEELS_HINT = (
    "Point pip at PyTorch's wheels for CPU: PyTorch's get-started page gives the address for "
    "Package 'Pip' and Compute Platform 'CPU'. Then set it as PIP_EXTRA_INDEX_URL (or in pip's "
    "configuration), uninstall this torch and run the set-up again."
)

_TORCH_PROBE = """
import json, torch
from torch.version import cuda, hip
print(json.dumps({"version": torch.__version__, "cuda": cuda, "hip": hip}))
"""


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of running a piece of Python in a process of its own."""

    ok: bool
    output: str
    error: str

    @property
    def reason(self) -> str:
        """The last line of the traceback, or how the process ended."""
        lines = self.error.strip().splitlines()
        return lines[-1].strip() if lines else "the process ended without a message"


Probe = Callable[[str], ProbeResult]


def run_python(code: str) -> ProbeResult:
    """Run `code` in a new interpreter of this environment."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return ProbeResult(done.returncode == 0, done.stdout, done.stderr)


def torch_problem(probe: Probe = run_python) -> str | None:
    """What is wrong with the installed torch and what to do, or None for a working CPU build."""
    result = probe(_TORCH_PROBE)
    if not result.ok:
        return f"torch does not import: {result.reason}. {_for_missing_libraries(result.reason)}"
    build = json.loads(result.output.strip().splitlines()[-1])
    for platform in ("cuda", "hip"):
        if build[platform] is not None:
            kind = f"{platform.upper()} {build[platform]}"
            return f"torch {build['version']} is a build for {kind}, not for CPU. {CPU_WHEELS_HINT}"
    return None


def _for_missing_libraries(reason: str) -> str:
    """Advice for a torch that fails to import."""
    if "No module named 'torch'" in reason:
        return "Install rbln-vllm[host]."
    return f"A missing library is the mark of a build for CUDA. {CPU_WHEELS_HINT}"


def broken_companions(
    is_installed: Callable[[str], bool], probe: Probe = run_python
) -> dict[str, str]:
    """Installed companions of torch that fail to import, each with the reason."""
    results = {name: probe(f"import {name}") for name in COMPANIONS if is_installed(name)}
    return {name: result.reason for name, result in results.items() if not result.ok}


def uninstall(names: list[str]) -> None:
    """Remove distributions with pip. Raises `subprocess.CalledProcessError` if pip fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "uninstall", "--yes", *names]
    subprocess.run(command, check=True)
