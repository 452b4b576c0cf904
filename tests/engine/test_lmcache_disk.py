# SPDX-License-Identifier: Apache-2.0
"""KV that LMCache keeps on disk, and what disks do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine.engines import (
    prompt,
)
from tests.engine.lmcache_engines import (
    KEPT,
    LONG,
    ask,
    disk_of,
    forget_everything,
    forget_pool,
    lmcache_engine,
    on_disk,
    written,
)

pytest.importorskip("lmcache", reason="the package lmcache is not installed")

from rbln_vllm.distributed.kv_transfer.lmcache import disk


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "chunks"


@pytest.fixture(scope="module")
def disk_llm(tiny_llama_dir: Path, directory: Path) -> Iterator[LLM]:
    """Chunks on disk alone: every hit reads it."""
    directory.mkdir()
    with lmcache_engine(tiny_llama_dir, directory, on_disk(directory)) as engine:
        yield engine


def flip(file: Path) -> None:
    """Large numbers in place of half the values, as long as before."""
    content = bytearray(file.read_bytes())
    half = len(content) // 2
    content[half:] = b"\x47" * (len(content) - half)
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swap(file: Path) -> None:
    """Another chunk under this name."""
    other = next(path for path in sorted(file.parent.glob("*.kv")) if path != file)
    shutil.copy(other, file)


def exchange_for_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


FAULTS = [flip, cut, swap, Path.unlink, exchange_for_directory]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("which", [0, 3, -1])
def test_damaged_files(
    disk_llm: LLM, directory: Path, fault: Callable[[Path], None], which: int
) -> None:
    forget_everything(disk_llm)
    for left in directory.rglob("*.kv"):
        left.rmdir() if left.is_dir() else left.unlink()
    tokens = prompt(LONG, seed=40)
    cold, _ = ask(disk_llm, tokens)
    files = written(directory, LONG // KEPT)
    forget_pool(disk_llm)
    assert ask(disk_llm, tokens) == (cold, LONG // KEPT * KEPT)
    fault(files[which])
    for _ in range(2):
        forget_pool(disk_llm)
        assert ask(disk_llm, tokens)[0] == cold


def test_a_directory_that_vanishes(disk_llm: LLM, directory: Path) -> None:
    tokens = prompt(LONG, seed=41)
    cold, _ = ask(disk_llm, tokens)
    written(directory, LONG // KEPT)
    home = Path(disk_of().path)
    shutil.rmtree(home)
    for _ in range(2):
        forget_pool(disk_llm)
        assert ask(disk_llm, tokens)[0] == cold
    home.mkdir()
    forget_everything(disk_llm)


def test_a_full_disk(disk_llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, and nothing is lost: neither memory nor the place of later chunks."""
    forget_everything(disk_llm)
    tokens = prompt(LONG, seed=43)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_block", full)
        cold, _ = ask(disk_llm, tokens)
        written(directory, 0)
        forget_pool(disk_llm)
        assert ask(disk_llm, tokens) == (cold, 0)
        written(directory, 0)
    assert disk_of().current_cache_size == 0
    forget_pool(disk_llm)
    assert ask(disk_llm, tokens) == (cold, 0)
    written(directory, LONG // KEPT)
    forget_pool(disk_llm)
    assert ask(disk_llm, tokens) == (cold, LONG // KEPT * KEPT)


def test_a_small_disk_keeps_the_latest(
    disk_llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_everything(disk_llm)
    chunk = 2 * 2 * 2 * 32 * KEPT * 4  # pairs, layers, heads, head size, tokens, floats
    monkeypatch.setattr(disk_of(), "max_cache_size", 10 * chunk)
    for seed in range(50, 54):
        ask(disk_llm, prompt(LONG, seed))
        written(directory, 1)
    assert len(list(directory.rglob("*.kv"))) <= 10
    assert disk_of().current_cache_size <= 10 * chunk
    forget_pool(disk_llm)
    assert ask(disk_llm, prompt(LONG, 53))[1] == LONG // KEPT * KEPT
