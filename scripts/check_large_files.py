# SPDX-License-Identifier: Apache-2.0
"""Refuse files that do not belong into a source repository: weights, traces, build output.

usage: check_large_files.py FILE...
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_KIB = 512


def main(argv: list[str]) -> int:
    """Name the files over the limit; returns the exit code."""
    large = [path for path in map(Path, argv) if path.stat().st_size > MAX_KIB * 1024]
    for path in large:
        print(f"{path}: {path.stat().st_size // 1024} KiB, the limit is {MAX_KIB} KiB")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
