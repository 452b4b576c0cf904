# SPDX-License-Identifier: Apache-2.0
"""A cache directory that test runs share, each state of what fills it with a part of its own."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_USE = "in-use"


@contextmanager
def kept_directory(root: Path, state: str) -> Iterator[Path]:
    """`root/state`, kept for later runs and safe while the block lasts.

    Directories of other states are removed, since nothing would ever use them, but not those that a
    run of another checkout, or its engines, are using.
    """
    directory = root / state
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as everything:
        fcntl.flock(everything, fcntl.LOCK_EX)
        directory.mkdir(exist_ok=True)
        in_use = (directory / IN_USE).open("w")
        fcntl.flock(in_use, fcntl.LOCK_SH)
        for other in root.iterdir():
            if other.is_dir() and other != directory:
                _remove_unused(other)
    with in_use:
        yield directory


def _remove_unused(directory: Path) -> None:
    with (directory / IN_USE).open("w") as in_use:
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(directory, ignore_errors=True)
