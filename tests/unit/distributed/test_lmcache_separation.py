# SPDX-License-Identifier: Apache-2.0
"""KV of one adapter or salt is never another's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rbln_vllm.distributed.kv_transfer.lmcache.separation import TAG, request_tags


def adapter(directory: Path, name: str = "a", number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(directory), lora_int_id=number)


def tags(salt: str | None = None, lora: Any = None) -> dict[str, str]:
    return request_tags(cast(Any, SimpleNamespace(cache_salt=salt, lora_request=lora)))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_tokens_alone_have_no_tags() -> None:
    assert tags() == {} == tags(salt="")


def test_everything_else_has_its_own(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "adapter_model.safetensors").write_bytes(b"other weights")
    found = [
        tags("a"),
        tags("b"),
        tags(lora=adapter(directory)),
        tags(lora=adapter(directory, "b")),
        tags(lora=adapter(other)),
        tags("a", adapter(directory)),
        tags(lora=adapter(Path("org/adapter"))),
        tags(lora=adapter(Path("org/adapter"), number=2)),
    ]
    assert all(set(each) == {TAG} for each in found)
    assert len({each[TAG] for each in found}) == len(found)


def test_the_same_is_the_same(directory: Path) -> None:
    assert tags("a", adapter(directory)) == tags("a", adapter(directory, number=7))


def test_other_weights_under_the_same_name(directory: Path) -> None:
    """An adapter is loaded again after its files have changed."""
    before = tags(lora=adapter(directory))
    file = directory / "adapter_model.safetensors"
    state = file.stat()
    file.write_bytes(b"changed")  # as long as before
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert tags(lora=adapter(directory)) != before


def test_a_salt_is_not_in_its_tag() -> None:
    assert "secret" not in tags("secret")[TAG]
