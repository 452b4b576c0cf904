# SPDX-License-Identifier: Apache-2.0
"""Check a wheel of this project: what is in it, and that its extension loads with no compiler.

usage: .venv/bin/python scripts/check_wheel.py WHEEL
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_MIB = 4
NEEDED = (
    r"rbln_host/_native\..*\.so",
    r"rbln_host/_native\.pyi",
    r"rbln_host/py\.typed",
    r"rbln_vllm/py\.typed",
    r"rbln_vllm/cli/main\.py",
    r"rbln_vllm-.*\.dist-info/entry_points\.txt",
    r"rbln_vllm-.*\.dist-info/licenses/LICENSE",
)
UNWANTED = r"rbln_host/native/.*|.*\.(cc|h|pth)|(?!rbln_(host|vllm)[/-]).*"
# Run with no PATH: whatever called a compiler would fail.
LOAD = "from rbln_host import _native; print(_native.__file__, *_native.isa_levels())"


def problems(names: list[str], size: int) -> list[str]:
    """What is wrong with the contents of a wheel of `size` bytes."""
    found = [f"{n} is missing" for n in NEEDED if not any(re.fullmatch(n, name) for name in names)]
    found += [f"{name} does not belong there" for name in names if re.fullmatch(UNWANTED, name)]
    if size > MAX_MIB * 2**20:
        found.append(f"{size / 2**20:.1f} MiB, the limit is {MAX_MIB} MiB")
    return found


def load(wheel: Path, directory: str) -> str:
    """Import the extension from the unpacked wheel; returns what LOAD prints."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    # -S: site-packages holds the editable installation.
    return subprocess.run(
        [sys.executable, "-S", "-c", LOAD],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": directory, "PATH": ""},
    ).stdout


def main(argv: list[str]) -> int:
    """Print what was found; returns the exit code."""
    wheel = Path(argv[0])
    with zipfile.ZipFile(wheel) as archive:
        found = problems(archive.namelist(), wheel.stat().st_size)
    for problem in found:
        print(f"{wheel.name}: {problem}")
    with tempfile.TemporaryDirectory() as directory:
        loaded = load(wheel, directory)
        if not loaded.startswith(directory):
            found.append("another extension was loaded")
            print(f"{wheel.name}: {found[-1]}: {loaded}")
    print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB, {loaded.split(' ', 1)[1].strip()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
