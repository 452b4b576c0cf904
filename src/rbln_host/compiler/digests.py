# SPDX-License-Identifier: Apache-2.0
"""Digests of large files, kept between starts for as long as the file is as it was.

A model of 1.2 billion parameters has 2.4 GB of weights and as much in its artifact; reading them
twice at every start takes a second.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rbln_host.compiler.files import digest_file, write_atomically

SMALL = 1 << 20
"""Files up to this size are read every time."""
SETTLED_NS = 2_000_000_000
"""A file changed so recently may change again without its times showing it."""

DigestOf = Callable[[Path], str]


class DigestMemo:
    """Remembers, in the JSON file ``path``, the digest of each file with what identified it.

    That is its device, inode, size and both its times of change, of which one cannot be set by
    a program. Whoever may write ``path`` may write the artifacts beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] | None = None

    def digest(self, file: Path) -> str:
        """BLAKE3 of a file's content. Raises OSError when it cannot be read."""
        before = file.stat()
        if before.st_size <= SMALL:
            return digest_file(file)
        known = self._read()
        name, identity = str(file.resolve()), _identity(before)
        entry = known.get(name)
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == identity:
            return str(entry[1])
        started = time.time_ns()
        digest = digest_file(file)
        changed = max(before.st_mtime_ns, before.st_ctime_ns)
        if changed + SETTLED_NS < started and _identity(file.stat()) == identity:
            self._remember(name, [identity, digest])
        return digest

    def _read(self) -> dict[str, Any]:
        if self._known is None:
            try:
                found = json.loads(self._path.read_bytes())
            except (OSError, ValueError, RecursionError):
                found = None  # there is none, or not one of ours: it is made anew
            self._known = found if isinstance(found, dict) else {}
        return self._known

    def _remember(self, name: str, entry: list[Any]) -> None:
        known = {n: e for n, e in self._read().items() if Path(n).exists()}
        self._known = {**known, name: entry}
        try:
            write_atomically(self._path, json.dumps(self._known).encode())
        except OSError:
            return  # a root that cannot be written to; the file is read again next time


def _identity(status: os.stat_result) -> list[int]:
    return [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
