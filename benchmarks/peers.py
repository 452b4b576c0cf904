# SPDX-License-Identifier: Apache-2.0
"""Install what the benchmark compares with, each in an environment of its own.

usage: python -m benchmarks.peers [NAME...]     NAME: openvino, llama_cpp,
                                                sentence_transformers, plots

vLLM's CPU backend needs none: it is in the project's own environment. llama.cpp is compiled,
which takes some minutes. What fails is left out of the benchmark, which says so.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paths import ENVIRONMENTS

SECONDS = 3600


@dataclass(frozen=True)
class Environment:
    """Requirements, and packages that they bring and that do not load beside a CPU torch."""

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


PEERS = {
    "openvino": Environment(
        ("torch==2.13.0", "optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0"),
        unwanted=("torchvision",),
    ),
    "llama_cpp": Environment(("llama-cpp-python==0.3.36", "numpy>=2.0")),
    "sentence_transformers": Environment(
        ("torch==2.13.0", "sentence-transformers==6.2.0"), unwanted=("torchvision",)
    ),
    "plots": Environment(("matplotlib==3.11.2",)),
}


def install(name: str) -> str | None:
    """Create and fill an environment; returns what went wrong, or None.

    Safe to run again: what is installed already stays.
    """
    folder = ENVIRONMENTS / name
    try:
        if not (folder / "bin" / "pip").exists():
            venv.create(folder, with_pip=True, clear=True)
        _pip(folder, "install", *PEERS[name].requirements)
        if PEERS[name].unwanted:
            _pip(folder, "uninstall", "--yes", *PEERS[name].unwanted)
    except subprocess.CalledProcessError as error:
        return f"{name}: {(error.stdout or b'')[-2000:].decode(errors='replace').strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}: {error}"
    return None


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--no-input", *arguments]
    subprocess.run(
        command, check=True, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def main(names: list[str]) -> int:
    """Install all or the named ones; 1 when one failed."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        print(f"error: no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
        return 1
    failed = False
    for name in names or PEERS:
        print(f"{name}: {', '.join(PEERS[name].requirements)}", flush=True)
        if problem := install(name):
            print(f"error: {problem}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
