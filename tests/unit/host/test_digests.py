# SPDX-License-Identifier: Apache-2.0
"""A remembered digest is given only for a file that has not changed since."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rbln_host.compiler import digests
from rbln_host.compiler.digests import DigestMemo
from rbln_host.compiler.files import digest_file


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was read; every file is large and settled at once."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(digests, "digest_file", counted)
    monkeypatch.setattr(digests, "SMALL", 0)
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**9))
    return names


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    return path


def test_an_unchanged_file_is_read_once(weights: Path, tmp_path: Path, read: list[str]) -> None:
    for _ in range(2):
        memo = DigestMemo(tmp_path / "memo")
        assert memo.digest(weights) == memo.digest(weights) == digest_file(weights)
    assert read == ["weights"]


def overwrite(path: Path) -> None:
    """Same size and, as far as a program can, the same times."""
    status = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def put_another_in_place(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"WEIGHTS")
    shutil.copystat(path, other)
    os.replace(other, path)


@pytest.mark.parametrize("change", [overwrite, put_another_in_place])
def test_a_changed_file_is_read_again(
    change: Callable[[Path], None], weights: Path, tmp_path: Path, read: list[str]
) -> None:
    memo = DigestMemo(tmp_path / "memo")
    before = memo.digest(weights)
    time.sleep(0.02)  # longer than the file system's clock ticks
    change(weights)
    assert memo.digest(weights) == digest_file(weights) != before
    assert DigestMemo(tmp_path / "memo").digest(weights) == digest_file(weights)


def test_a_file_that_changed_just_now_is_not_remembered(
    weights: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 10**12)
    memo = DigestMemo(tmp_path / "memo")
    memo.digest(weights)
    memo.digest(weights)
    assert read == ["weights", "weights"]


def test_small_files_are_read_every_time(
    weights: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SMALL", 100)
    memo = DigestMemo(tmp_path / "memo")
    memo.digest(weights)
    memo.digest(weights)
    assert len(read) == 2
    assert not (tmp_path / "memo").exists()


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "[" * 100_000, '{"%s": 3}', '{"%s": [[], "x", 1]}', '{"%s": [3]}'],
)
def test_a_memo_that_is_none_is_made_anew(
    text: str, weights: Path, tmp_path: Path, read: list[str]
) -> None:
    memo = tmp_path / "memo"
    memo.write_text(text.replace("%s", str(weights)))
    assert DigestMemo(memo).digest(weights) == digest_file(weights)
    assert DigestMemo(memo).digest(weights) == digest_file(weights)
    assert read == ["weights"]


def test_files_that_are_gone_are_forgotten(weights: Path, tmp_path: Path, read: list[str]) -> None:
    memo = DigestMemo(tmp_path / "memo")
    memo.digest(weights)
    weights.rename(tmp_path / "moved")
    memo.digest(tmp_path / "moved")
    assert str(weights) not in (tmp_path / "memo").read_text()


def test_a_root_that_cannot_be_written_to(weights: Path, tmp_path: Path, read: list[str]) -> None:
    memo = DigestMemo(tmp_path / "no such directory" / "memo")
    assert memo.digest(weights) == digest_file(weights)
