# SPDX-License-Identifier: Apache-2.0
"""A block file gives back exactly what was written under its name, or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from rbln_vllm.distributed.kv_transfer.offload.block_file import (
    HEADER_BYTES,
    DamagedBlockError,
    read_block,
    write_block,
)

IDENTITY, KEY = bytes(range(32)), b"key"
PAYLOAD = bytes(range(256)) * 20


def write(path: Path, payload: bytes = PAYLOAD) -> Path:
    write_block(path, IDENTITY, KEY, memoryview(payload))
    return path


def read(path: Path, identity: bytes = IDENTITY, key: bytes = KEY, size: int = 0) -> bytes:
    into = bytearray(size or len(PAYLOAD))
    read_block(path, identity, key, memoryview(into))
    return bytes(into)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "block")) == PAYLOAD


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    content = write(tmp_path / "block").read_bytes()
    for position in (*range(HEADER_BYTES + 2), len(content) // 2, len(content) - 1):
        for bit in (1, 128):
            changed = bytearray(content)
            changed[position] ^= bit
            (tmp_path / "block").write_bytes(changed)
            with pytest.raises(DamagedBlockError):
                read(tmp_path / "block")


@pytest.mark.parametrize(
    "length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(PAYLOAD)]
)
def test_a_file_of_any_other_length_is_seen(tmp_path: Path, length: int) -> None:
    content = write(tmp_path / "block").read_bytes()
    (tmp_path / "block").write_bytes(content[:length])
    with pytest.raises(DamagedBlockError):
        read(tmp_path / "block")
    (tmp_path / "block").write_bytes(content + b"x")
    with pytest.raises(DamagedBlockError):
        read(tmp_path / "block")


def test_a_block_of_another_identity_key_or_size_is_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "block")
    with pytest.raises(DamagedBlockError, match="another model"):
        read(path, identity=bytes(32))
    with pytest.raises(DamagedBlockError, match="checksum"):
        read(path, key=b"other")
    with pytest.raises(DamagedBlockError, match="bytes for a block of"):
        read(path, size=len(PAYLOAD) - 1)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    real, calls = os.write, 0

    def fill_up(descriptor: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[:100])

    with patch.object(os, "write", fill_up), pytest.raises(OSError, match="full"):
        write(tmp_path / "block")
    assert calls == 3
    assert not list(tmp_path.iterdir())


def test_short_writes_and_reads_go_on(tmp_path: Path) -> None:
    write_some, read_some = os.write, os.readv
    with (
        patch.object(os, "write", lambda d, data: write_some(d, data[:999])),
        patch.object(os, "readv", lambda d, buffers: read_some(d, [buffers[0][:77]])),
    ):
        assert read(write(tmp_path / "block")) == PAYLOAD


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    assert write(tmp_path / "block").stat().st_mode & 0o077 == 0
