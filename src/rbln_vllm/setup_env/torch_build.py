# SPDX-License-Identifier: Apache-2.0
"""Is the installed torch a CPU build, and do its companions load beside it?

Imports are tried in a process of their own: a broken extension may end the process that loads it.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

CPU_WHEELS_HINT = (
    "Point pip at PyTorch's wheels for CPU: PyTorch's get-started page gives the address for "
    "Package 'Pip' and Compute Platform 'CPU'. Then set it as PIP_EXTRA_INDEX_URL (or in pip's "
    "configuration), uninstall this torch and run the set-up again."
)


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


def torch_directory() -> Path | None:
    """Where torch is installed, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def build_problem(torch_dir: Path | None) -> str | None:
    """What is wrong with the build of torch in a directory and what to do, or None.

    Reads `version.py` alone, so it also judges a torch whose libraries or requirements are missing.
    """
    if torch_dir is None:
        return "torch is not installed: install rbln-vllm[host]"
    build = runpy.run_path(str(torch_dir / "version.py"))
    for platform in ("cuda", "hip", "xpu"):
        target = build.get(platform)
        if target is not None:
            kind = f"{platform.upper()} {target}"
            return (
                f"torch {build['__version__']} is built for {kind}, not for CPU. {CPU_WHEELS_HINT}"
            )
    return None


def import_problem(probe: Probe = run_python) -> str | None:
    """Why torch does not import and what to do, or None."""
    result = probe("import torch")
    if result.ok:
        return None
    return f"torch does not import: {result.reason}. Install rbln-vllm[host] with what it requires."


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
