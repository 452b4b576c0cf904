# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and digests of files."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3


def aside(path: Path) -> Path:
    """A new hidden name beside ``path``, on the same file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to; the file is renamed to ``path`` on success, removed on failure.

    A reader sees the old file or the new one, never a part, and one who has mapped the old file
    keeps it.
    """
    temporary = aside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write aside, flush to the disk and rename."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def digest(data: bytes) -> str:
    """BLAKE3 of bytes."""
    return str(blake3.blake3(data).hexdigest())


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's content, on all cores."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    if path.stat().st_size:
        hasher.update_mmap(path)
    return str(hasher.hexdigest())
