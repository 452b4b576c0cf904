# SPDX-License-Identifier: Apache-2.0
"""Memory and disk together: blocks go down, come back whole, and a bad one is a miss for good."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from rbln_vllm.distributed.kv_transfer.offload.costs import Costs, Tier
from rbln_vllm.distributed.kv_transfer.offload.disk_store import DiskStore
from rbln_vllm.distributed.kv_transfer.offload.disk_tier import DiskTier, PendingWrites
from rbln_vllm.distributed.kv_transfer.offload.manager import OffloadManager
from rbln_vllm.distributed.kv_transfer.offload.region import OffloadRegion

CHUNKS, SIZE = 4, 4096
Key = Any


def key(number: int) -> Key:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Tiers:
    """A manager of `CHUNKS` chunks of memory over a directory, and one request after another."""

    def __init__(self, directory: Path) -> None:
        self.region = OffloadRegion(uuid.uuid4().hex, CHUNKS, SIZE)
        region: Any = self.region
        memory = CPUPrimaryTierOffloadingManager(CHUNKS, region)
        self.store = DiskStore(directory, bytes(32), 1 << 20)
        spec: Any = None  # only upstream's tiers read it
        self.disk = DiskTier(spec, memory.get_kv_memoryview(), self.store, readers=1)
        self.manager = OffloadManager(memory, self.disk, Costs())

    def request(self, name: str) -> ReqContext:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def settle(self) -> None:
        deadline = time.monotonic() + 60
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.0005)

    def put(self, number: int, context: ReqContext) -> None:
        """As if the worker had stored a block full of `number`."""
        output = self.manager.prepare_store([key(number)], context)
        assert output is not None
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        self.region.rows_CB[output.store_spec.chunk_ids] = number
        self.manager.complete_store([key(number)], context)
        self.settle()

    def find(self, number: int, context: ReqContext) -> LookupResult:
        """The answer once it is known. Fails when it never is."""
        for _ in range(50):
            result = self.manager.lookup(key(number), context)
            if result in (LookupResult.HIT, LookupResult.MISS):
                return result
            self.step()
            self.settle()
        raise AssertionError("the request would wait for ever")

    def bytes_of(self, number: int, context: ReqContext) -> set[int]:
        spec = self.manager.prepare_load([key(number)], context)
        assert isinstance(spec, CPULoadStoreSpec)
        self.manager.complete_load([key(number)], context)
        return set(self.region.rows_CB[spec.chunk_ids].ravel().tolist())


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.settle()
    made.manager.shutdown()


def test_more_blocks_than_memory_holds_come_back_from_disk(tiers: Tiers) -> None:
    context = tiers.request("stores")
    for number in range(1, 3 * CHUNKS):
        tiers.put(number, context)
    places = [tiers.manager.tier_of(key(n), context) for n in range(1, 3 * CHUNKS)]
    assert places.count(Tier.MEMORY) == CHUNKS
    assert places.count(Tier.DISK) == 2 * CHUNKS - 1
    for number in range(1, 3 * CHUNKS):
        reader = tiers.request(f"reads {number}")
        assert tiers.find(number, reader) is LookupResult.HIT
        assert tiers.bytes_of(number, reader) == {number}
    assert tiers.find(99, tiers.request("another")) is LookupResult.MISS


def test_a_block_that_cannot_be_read_is_a_miss_and_does_not_keep_its_request(tiers: Tiers) -> None:
    """Its file is still there: asked again, the disk would promise it again."""
    tiers.put(1, tiers.request("stores"))
    tiers.manager.primary_tier.reset_cache()
    context = tiers.request("reads")
    with patch.object(DiskStore, "read", side_effect=OSError("injected")):
        assert tiers.find(1, context) is LookupResult.MISS
        assert tiers.find(1, context) is LookupResult.MISS
    assert tiers.find(1, tiers.request("later")) is LookupResult.HIT


def test_a_bad_block_does_not_take_its_neighbours_along(tiers: Tiers) -> None:
    writer = tiers.request("stores")
    for number in (1, 2, 3):
        tiers.put(number, writer)
    tiers.manager.primary_tier.reset_cache()
    path = tiers.store.path(key(2))
    path.write_bytes(path.read_bytes()[:-1])
    context = tiers.request("reads")
    for number in (1, 2, 3):  # one job for all
        tiers.manager.lookup(key(number), context)
    assert [tiers.find(number, context) for number in (1, 2, 3)] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]
    assert not path.exists()


def test_a_block_pushed_out_before_its_use_is_read_once_per_admission(tiers: Tiers) -> None:
    tiers.put(1, tiers.request("stores"))
    context = tiers.request("waits")
    for admission in range(2):
        tiers.manager.primary_tier.reset_cache()
        assert tiers.find(1, context) is LookupResult.HIT, admission
        tiers.manager.primary_tier.reset_cache()
        assert tiers.find(1, context) is LookupResult.MISS
        tiers.manager.primary_tier.reset_cache()
        assert tiers.find(1, tiers.request(f"other {admission}")) is LookupResult.HIT
        tiers.bytes_of(1, context)  # admitted with what others brought


def test_writing_pauses_after_a_failure(tiers: Tiers) -> None:
    context = tiers.request("stores")
    with patch.object(DiskStore, "write", side_effect=OSError("injected")) as write:
        tiers.put(1, context)
        tiers.put(2, context)
    assert write.call_count == 1
    tiers.put(3, context)
    assert not tiers.store.has(key(3))
    tiers.disk._no_writes_before = 0.0
    tiers.put(4, context)
    assert tiers.store.has(key(4))


def test_what_waits_to_be_written_holds_half_the_memory_at_most() -> None:
    pending = PendingWrites(2)
    pending.submitted(2)
    assert pending.should_store(1)
    pending.submitted(1)
    assert not pending.should_store(1)
    pending.finished(2)
    assert pending.should_store(1)
