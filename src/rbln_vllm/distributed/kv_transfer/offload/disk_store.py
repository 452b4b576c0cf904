# SPDX-License-Identifier: Apache-2.0
"""A directory of block files with a limit on its size.

Nothing is kept in memory about the files: what is there is what the directory says, so blocks of
an earlier run are found at once and any number of servers may share one directory. A file's
modification time is its last use; the oldest go first. All methods may be called from any thread.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rbln_vllm.distributed.kv_transfer.offload.block_file import (
    HEADER_BYTES,
    IDENTITY_BYTES,
    SUFFIX,
    TEMPORARY,
    DamagedBlockError,
    read_block,
    write_block,
)

ABANDONED_SECONDS = 600
"""A file still being written after this long was left by a process that died."""
SCANS_PER_LIMIT = 16
"""The directory is measured anew after writing this fraction of the limit: others write too."""
KEPT_AFTER_EVICTION = 0.9
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _File:
    used_at: float
    size: int
    path: str


class DiskStore:
    """Blocks of one ``identity`` below ``root``; ``limit_bytes`` covers everything in ``root``."""

    def __init__(
        self, root: Path, identity: bytes, limit_bytes: int, about: Mapping[str, str] | None = None
    ) -> None:
        """Raises OSError when ``root`` cannot be made or written to."""
        if len(identity) != IDENTITY_BYTES:
            raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}")
        self._root, self._identity, self._limit = root, identity, limit_bytes
        self._directory = root / identity.hex()[:16]
        self._lock = threading.Lock()
        self._used = 0
        self._written = limit_bytes  # measure before the first write
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._directory / "about.json").write_text(json.dumps(dict(about or {}), indent=2) + "\n")

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self._directory / name[:2] / f"{name}{SUFFIX}"

    def has(self, key: bytes) -> bool:
        """Whether a file of that name is there; False when the directory cannot be reached."""
        return os.path.exists(self.path(key))

    def read(self, key: bytes, into: memoryview) -> None:
        """Fills ``into`` and marks the block as used.

        Raises DamagedBlockError, having removed the file, or OSError. ``into`` is then undefined.
        """
        path = self.path(key)
        try:
            read_block(path, self._identity, key, into)
        except DamagedBlockError as error:
            with suppress(OSError):
                path.unlink()
            raise DamagedBlockError(f"{path}: {error}; removed") from None
        with suppress(OSError):
            os.utime(path)

    def write(self, key: bytes, payload: memoryview) -> None:
        """Writes a block that is not there yet, after the oldest have made room for it.

        Raises OSError: no room, or the directory is gone (it is not made again: what is mounted
        there may be missing).
        """
        path = self.path(key)
        if path.exists():
            return
        self._make_room(len(payload) + HEADER_BYTES)
        self._make_parent(path)
        try:
            write_block(path, self._identity, key, payload)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._evict_for_full_disk(len(payload) + HEADER_BYTES)
            write_block(path, self._identity, key, payload)

    def _make_parent(self, path: Path) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", str(self._root))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._used += size
            self._written += size
            if self._used > self._limit or self._written * SCANS_PER_LIMIT > self._limit:
                self._used = self._trim(self._limit - size) + size
                self._written = size

    def _evict_for_full_disk(self, size: int) -> None:
        """Another user filled the disk: give it a tenth of ours, and at least one block."""
        with self._lock:
            used = sum(file.size for file in self._files())
            most = min(int(used * KEPT_AFTER_EVICTION), used - size)
            self._used = self._trim(most, keep=1.0) + size

    def _trim(self, most: int, keep: float = KEPT_AFTER_EVICTION) -> int:
        """Removes the oldest files until at most ``most`` bytes are left; returns what is left.

        Once over the limit, goes on to ``keep`` of it, so that not every write must measure.
        """
        files = sorted(self._files(), key=lambda file: file.used_at)
        used = sum(file.size for file in files)
        if used <= most:
            return used
        for file in files:
            if used <= most * keep:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            used -= file.size
        return used

    def _files(self) -> Iterator[_File]:
        """Every block file below the root, whoever wrote it. Removes abandoned scratch files."""
        now = time.time()
        for folder, _, names in os.walk(self._root):
            for name in names:
                if not name.endswith((SUFFIX, TEMPORARY)):
                    continue
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    status = os.stat(path)
                    if name.endswith(SUFFIX):
                        yield _File(status.st_mtime, status.st_size, path)
                    elif now - status.st_mtime > ABANDONED_SECONDS:
                        os.unlink(path)
