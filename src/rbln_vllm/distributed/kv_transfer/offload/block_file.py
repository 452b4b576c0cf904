# SPDX-License-Identifier: Apache-2.0
"""One block of KV in one file, which is never taken for another block or for a damaged one.

Layout: magic (8 bytes), payload length (8, little endian), BLAKE3 of identity + key + payload
(32), identity (32: what the content depends on besides its tokens), payload. The file appears
under its name in one rename, so that a reader sees all of it or nothing.
"""

import os
import struct
import uuid
from contextlib import suppress
from pathlib import Path

import blake3

MAGIC = b"RBLNKV01"
IDENTITY_BYTES = 32
SUFFIX, TEMPORARY = ".kv", ".tmp"
_HEADER = struct.Struct(f"<8sQ32s{IDENTITY_BYTES}s")
HEADER_BYTES = _HEADER.size


class DamagedBlockError(Exception):
    """A file does not hold the block its name says; nothing of it may be used."""


def write_block(path: Path, identity: bytes, key: bytes, payload: memoryview) -> None:
    """Writes aside, then renames. Raises OSError and leaves nothing behind when that fails."""
    header = _HEADER.pack(MAGIC, len(payload), _checksum(identity, key, payload), identity)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    try:
        # KV gives away the text it was computed from: for this user's eyes alone.
        with open(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb", 0) as file:
            _write_all(file.fileno(), memoryview(header))
            _write_all(file.fileno(), payload)
        scratch.rename(path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def read_block(path: Path, identity: bytes, key: bytes, into: memoryview) -> None:
    """Fills ``into`` with the payload.

    Raises DamagedBlockError when the file is not that block, OSError when it cannot be read.
    ``into`` is then undefined.
    """
    with open(path, "rb", 0) as file:
        length, checksum = _read_header(file.read(HEADER_BYTES), identity)
        size = os.fstat(file.fileno()).st_size - HEADER_BYTES
        if length != len(into) or size != length:
            raise DamagedBlockError(f"{size} bytes for a block of {len(into)}")
        _read_all(file.fileno(), into)
    if _checksum(identity, key, into) != checksum:
        raise DamagedBlockError("its checksum does not match")


def _read_header(header: bytes, identity: bytes) -> tuple[int, bytes]:
    if len(header) < HEADER_BYTES:
        raise DamagedBlockError("it is cut off")
    magic, length, checksum, found = _HEADER.unpack(header)
    if magic != MAGIC:
        raise DamagedBlockError("it is no block of this format")
    if found != identity:
        raise DamagedBlockError("it belongs to another model or configuration")
    return length, checksum


def _checksum(identity: bytes, key: bytes, payload: memoryview) -> bytes:
    hasher = blake3.blake3(identity)
    hasher.update(len(key).to_bytes(8, "little") + key)
    hasher.update(payload)
    return bytes(hasher.digest())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, into: memoryview) -> None:
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            raise DamagedBlockError("it was cut off while being read")
        into = into[count:]
