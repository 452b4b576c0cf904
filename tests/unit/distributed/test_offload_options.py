# SPDX-License-Identifier: Apache-2.0
"""Options of KV offload: what is taken, and what is refused in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from rbln_vllm.distributed.kv_transfer.offload.options import (
    DEFAULT_DISK_BYTES,
    GIB,
    LoadPolicy,
    OffloadOptions,
)
from rbln_vllm.distributed.kv_transfer.offload.settle import (
    CONNECTOR_MODULE,
    SPEC,
    SPEC_MODULE,
    settle_offload,
)


def test_memory_alone_is_vllms_own_option() -> None:
    options = OffloadOptions.parse({"cpu_bytes_to_use": 0.5 * GIB, "block_size": 128})
    assert options == OffloadOptions(GIB // 2, None, DEFAULT_DISK_BYTES, 2, LoadPolicy.MEASURED)


def test_disk_alone_and_both() -> None:
    extra = {"disk_directory": "/somewhere", "disk_bytes_to_use": 5, "load_policy": "always"}
    assert OffloadOptions.parse(extra) == OffloadOptions(
        0, Path("/somewhere"), 5, 2, LoadPolicy.ALWAYS
    )
    assert OffloadOptions.parse({**extra, "cpu_bytes_to_use": 7}).cpu_bytes == 7


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "--kv-offloading-size"),
        ({"cpu_bytes_to_use": 0}, "disk_directory"),
        ({"cpu_bytes_to_use": -1}, "negative"),
        ({"cpu_bytes_to_use": "many"}, "must be a number"),
        ({"cpu_bytes_to_use": True}, "must be a number"),
        ({"disk_directory": "d", "disk_bytes_to_use": 0}, "positive"),
        ({"disk_directory": "d", "disk_read_threads": 0}, "1 or more"),
        ({"disk_directory": "d", "load_policy": "never"}, "'measured', 'always'"),
        ({"disk_directory": "d", "disk_dir": "e"}, "no option disk_dir.*disk_directory"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": []}, "disk_directory instead"),
        ({"cpu_bytes_to_use": 1, "canonical_layout": True}, "leave it out"),
        ({"cpu_bytes_to_use": 1, "store_threshold": 2}, "leave it out"),
    ],
)
def test_refused(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OffloadOptions.parse(extra)


def config(transfer: KVTransferConfig | None, size: float | None = None) -> Any:
    cache = SimpleNamespace(kv_offloading_size=size, kv_offloading_backend="native")
    return SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)


def test_the_size_becomes_our_connector() -> None:
    settled = config(None, 0.5)
    settle_offload(settled)
    settle_offload(settled)  # vLLM asks the platform again in the engine's process
    transfer = settled.kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_role == "kv_both"
    assert transfer.kv_connector_module_path == CONNECTOR_MODULE
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config == {
        "cpu_bytes_to_use": GIB // 2,
        "spec_name": SPEC,
        "spec_module_path": SPEC_MODULE,
    }


def test_the_size_goes_with_a_directory() -> None:
    extra = {"disk_directory": "/somewhere"}
    settled = config(KVTransferConfig(kv_connector_extra_config=extra), 1)
    settle_offload(settled)
    options = OffloadOptions.parse(settled.kv_transfer_config.kv_connector_extra_config)
    assert (options.cpu_bytes, options.disk_directory) == (GIB, Path("/somewhere"))


def test_other_connectors_are_left_alone() -> None:
    transfer = KVTransferConfig(kv_connector="Other", kv_role="kv_both")
    settle_offload(config(transfer))
    assert transfer.kv_connector_module_path is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_role": "kv_producer"}, "kv_both"),
        ({"kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec"}}, "spec_name"),
        ({"kv_connector_extra_config": {"nothing": 1}}, "no option nothing"),
    ],
)
def test_a_transfer_config_is_checked(fields: dict[str, Any], words: str) -> None:
    values = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **fields}
    with pytest.raises(ValueError, match=words):
        settle_offload(config(KVTransferConfig(**values)))
