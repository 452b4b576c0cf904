# SPDX-License-Identifier: Apache-2.0
"""The directory keeps its limit, drops what was used longest ago, and may be shared."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from rbln_vllm.distributed.kv_transfer.offload import disk_store
from rbln_vllm.distributed.kv_transfer.offload.block_file import HEADER_BYTES, DamagedBlockError
from rbln_vllm.distributed.kv_transfer.offload.disk_store import DiskStore

SIZE = 1000
FILE = SIZE + HEADER_BYTES
IDENTITY = b"i" * 32


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def store(root: Path, files: float = 1000, identity: bytes = IDENTITY) -> DiskStore:
    return DiskStore(root, identity, int(files * FILE))


def put(disk: DiskStore, number: int) -> None:
    disk.write(key(number), memoryview(payload(number)))


def get(disk: DiskStore, number: int) -> bytes:
    into = bytearray(SIZE)
    disk.read(key(number), memoryview(into))
    return bytes(into)


def used(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.kv"))


def age(disk: DiskStore, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(disk.path(key(number)), (then, then))


def test_a_later_run_finds_what_an_earlier_one_stored(tmp_path: Path) -> None:
    put(store(tmp_path), 1)
    later = store(tmp_path)
    assert later.has(key(1))
    assert not later.has(key(2))
    assert get(later, 1) == payload(1)


def test_another_identity_finds_nothing(tmp_path: Path) -> None:
    put(store(tmp_path), 1)
    assert not store(tmp_path, identity=b"j" * 32).has(key(1))


def test_a_foreign_file_under_the_right_name_is_removed(tmp_path: Path) -> None:
    other, disk = store(tmp_path, identity=b"j" * 32), store(tmp_path)
    put(other, 1)
    disk.path(key(1)).parent.mkdir(parents=True)
    other.path(key(1)).rename(disk.path(key(1)))
    with pytest.raises(DamagedBlockError, match="removed"):
        get(disk, 1)
    assert not disk.has(key(1))
    put(disk, 1)
    assert get(disk, 1) == payload(1)


@pytest.mark.parametrize("files", [1.0, 1.5, 2, 3, 17, 40])
def test_the_limit_is_kept_after_every_write(tmp_path: Path, files: float) -> None:
    disk = store(tmp_path, files)
    for number in range(60):
        put(disk, number)
        assert used(tmp_path) <= files * FILE
        assert disk.has(key(number))


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    disk = store(tmp_path, 10)
    for number in range(10):
        put(disk, number)
        age(disk, number, 100 - number)
    get(disk, 0)
    put(disk, 10)
    assert disk.has(key(0))
    assert not disk.has(key(1))
    assert disk.has(key(10))


def test_blocks_of_other_models_make_room_too(tmp_path: Path) -> None:
    other, disk = store(tmp_path, 4, b"j" * 32), store(tmp_path, 4)
    for number in range(4):
        put(other, number)
        age(other, number, 50)
    put(disk, 9)
    assert disk.has(key(9))
    assert used(tmp_path) <= 4 * FILE


def test_two_servers_share_the_limit(tmp_path: Path) -> None:
    """Each measures what the other wrote after a sixteenth of the limit."""
    first, second = store(tmp_path, 64), store(tmp_path, 64)
    for number in range(200):
        put((first, second)[number % 2], number)
        assert used(tmp_path) <= (64 + 2 * 64 / disk_store.SCANS_PER_LIMIT) * FILE


def test_a_full_disk_is_given_room_once(tmp_path: Path) -> None:
    disk = store(tmp_path)
    for number in range(20):
        put(disk, number)
        age(disk, number, 100 - number)
    real, failures = os.write, [OSError(errno.ENOSPC, "full")]

    def full_once(descriptor: int, data: memoryview) -> int:
        if failures:
            raise failures.pop()
        return real(descriptor, data)

    with patch.object(os, "write", full_once):
        put(disk, 20)
    assert get(disk, 20) == payload(20)
    assert [disk.has(key(number)) for number in range(4)] == [False, False, True, True]


def test_a_disk_that_stays_full_raises(tmp_path: Path) -> None:
    disk = store(tmp_path)
    with (
        patch.object(os, "write", side_effect=OSError(errno.ENOSPC, "full")),
        pytest.raises(OSError, match="full"),
    ):
        put(disk, 1)
    assert not disk.has(key(1))


def test_a_vanished_directory_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    disk = store(root)
    put(disk, 1)
    root.rename(tmp_path / "away")
    assert not disk.has(key(1))
    with pytest.raises(FileNotFoundError):
        get(disk, 1)
    with pytest.raises(FileNotFoundError, match="gone"):
        put(disk, 2)
    assert not root.exists()
    (tmp_path / "away").rename(root)
    put(disk, 2)
    assert get(disk, 1) == payload(1)


def test_only_abandoned_scratch_files_are_removed(tmp_path: Path) -> None:
    disk = store(tmp_path)
    folder = disk.path(key(1)).parent
    folder.mkdir(parents=True)
    old, young, foreign = folder / "a.tmp", folder / "b.tmp", folder / "notes"
    for path in (old, young, foreign):
        path.write_text("x")
    for path in (old, foreign):
        os.utime(path, (1, 1))
    put(disk, 1)  # the first write measures
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".kv") == [
        "b.tmp",
        "notes",
    ]


def test_a_root_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        store(tmp_path / "file" / "below")


def test_threads_of_two_servers_never_read_what_was_not_written(tmp_path: Path) -> None:
    """Random writes, reads and evictions at once: a block is whole, or a miss."""
    servers = [store(tmp_path, 12) for _ in range(2)]
    wrong: list[int] = []
    hits = [0]

    def work(seed: int) -> None:
        chance, disk = random.Random(seed), servers[seed % 2]
        for _ in range(50):
            number = chance.randrange(24)
            if chance.random() < 0.5:
                put(disk, number)
            elif disk.has(key(number)):
                try:
                    found = get(disk, number)
                except FileNotFoundError:
                    continue  # evicted in between
                hits[0] += 1
                if found != payload(number):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits[0]
    assert not wrong
