# SPDX-License-Identifier: Apache-2.0
"""What of LMCache's configuration is refused, and what is settled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.distributed.kv_transfer.lmcache.settings import (
    DIRECTORY,
    DISK,
    HASH,
    IDENTITY,
    check,
    settle,
    uses_disk,
)

DEFAULTS: dict[str, Any] = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0.0,
    "pre_caching_hash_algorithm": "builtin",
    "extra_config": None,
    "storage_plugins": None,
    "remote_url": None,
    "remote_storage_plugins": None,
    "gds_path": None,
    "maru_path": None,
    "external_lookup_client": None,
    "hit_miss_ratio": None,
    **dict.fromkeys(
        (
            "use_layerwise",
            "enable_blending",
            "enable_async_loading",
            "enable_pd",
            "enable_p2p",
            "enable_scheduler_bypass_lookup",
            "enable_chunk_statistics",
            "enable_kv_events",
        ),
        False,
    ),
}


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **fields})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_layerwise": True}, "use_layerwise"),
    ({"enable_blending": True}, "enable_blending"),
    ({"enable_async_loading": True}, "enable_async_loading"),
    ({"enable_pd": True}, "enable_pd"),
    ({"enable_p2p": True}, "enable_p2p"),
    ({"remote_url": "lm://there:1"}, "remote_url"),
    ({"remote_storage_plugins": ["x"]}, "remote_storage_plugins"),
    ({"gds_path": "/there"}, "gds_path"),
    ({"maru_path": "/there"}, "maru_path"),
    ({"storage_plugins": ["x"]}, "storage_plugins"),
    ({"external_lookup_client": "mooncakestore://there"}, "lookup"),
    ({"hit_miss_ratio": 0.5}, "hit_miss_ratio"),
    ({"enable_scheduler_bypass_lookup": True}, "bypassed lookup"),
    ({"enable_chunk_statistics": True}, "enable_chunk_statistics"),
    ({"enable_kv_events": True}, "kv-events-config"),
    ({"pre_caching_hash_algorithm": "xxhash"}, HASH),
    ({"max_local_cpu_size": 0}, "GiB above 0"),
    ({"local_disk": "/there"}, "max_local_disk_size go together"),
    ({"max_local_disk_size": 1.0}, "max_local_disk_size go together"),
    ({"local_cpu": False}, "nothing to store in"),
    ({"chunk_size": 0}, "chunk_size"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=str)
def test_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(config(**fields))


def test_memory_alone() -> None:
    memory = config()
    check(memory)
    settle(memory, "ab")
    assert memory.pre_caching_hash_algorithm == HASH
    assert (memory.storage_plugins, memory.extra_config) == (None, None)
    assert not uses_disk(memory)


def test_a_disk_becomes_our_backend_once() -> None:
    disk = config(local_disk="/there", max_local_disk_size=1.0, extra_config={"kept": 1})
    for _ in range(2):
        check(disk)
        settle(disk, "ab")
        assert disk.local_disk is None, "LMCache's own backend would read it"
        assert disk.storage_plugins == [DISK]
        assert (disk.extra_config[DIRECTORY], disk.extra_config[IDENTITY]) == ("/there", "ab")
        assert disk.extra_config["kept"] == 1
        assert uses_disk(disk)


def test_the_backend_can_be_found_by_its_names() -> None:
    pytest.importorskip("lmcache", reason="the package lmcache is not installed")
    from importlib import import_module

    disk = config(local_disk="/there", max_local_disk_size=1.0)
    settle(disk, "ab")
    module = import_module(disk.extra_config[f"storage_plugin.{DISK}.module_path"])
    assert hasattr(module, disk.extra_config[f"storage_plugin.{DISK}.class_name"])


def test_lmcache_has_all_settings_that_are_looked_at() -> None:
    pytest.importorskip("lmcache", reason="the package lmcache is not installed")
    from lmcache.v1.config import LMCacheEngineConfig

    real = LMCacheEngineConfig.from_defaults()
    assert {name: getattr(real, name) for name in DEFAULTS} == DEFAULTS
    check(real)
