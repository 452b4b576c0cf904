# SPDX-License-Identifier: Apache-2.0
"""Rules that need no engine, and blocks that could not be loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from rbln_vllm.distributed.kv_transfer.lmcache import CONNECTOR, register
from rbln_vllm.distributed.kv_transfer.lmcache.rules import check_pool
from rbln_vllm.distributed.kv_transfer.lmcache.unloaded import evict_unloaded

SIZES: dict[str, Any] = {
    "block_size": 8,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=16)


def pool(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_full_attention_is_served() -> None:
    check_pool(pool(FULL))


@pytest.mark.parametrize("specs", [(WINDOW,), (FULL, WINDOW), (FULL, FULL), ()])
def test_other_pools_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="full attention alone"):
        check_pool(pool(*specs))


def test_registration_twice() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__name__ == CONNECTOR


class FakeManager:
    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks, self.evicted = blocks, set[int]()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks[request_id],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def test_what_was_computed_on_an_unloaded_block_goes_too() -> None:
    manager = FakeManager({"a": [1, 2, 3], "b": [1, 5, 6], "c": [7], "d": []})
    evict_unloaded(cast(Any, manager), manager.blocks, {2, 6})
    assert manager.evicted == {2, 3, 6}
