# SPDX-License-Identifier: Apache-2.0
"""Directories that are whole as soon as they are there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def make_aside(target: Path, write: Callable[[Path], None]) -> None:
    """Create `target` in one rename; of two processes at once the later one yields.

    `write` fills the empty directory that it is given.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        write(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
