# SPDX-License-Identifier: Apache-2.0
"""Copies between pool and memory tier: the right bytes, in order, reported once."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from rbln_vllm.distributed.kv_transfer.offload.pool_blocks import PoolBlocks
from rbln_vllm.distributed.kv_transfer.offload.region import OffloadRegion
from rbln_vllm.distributed.kv_transfer.offload.worker import HostOffloadingWorker, matched_blocks

BLOCKS, LAYERS, PAGE = 7, 3, 40


def one_buffer() -> list[torch.Tensor]:
    """Layers of one buffer, as vLLM allocates them."""
    buffer = torch.zeros(LAYERS, BLOCKS, PAGE, dtype=torch.int8)
    return [buffer[layer] for layer in range(LAYERS)]


def separate() -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, PAGE, dtype=torch.int8) for _ in range(LAYERS)]


def unequal() -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, PAGE + 8 * layer, dtype=torch.int8) for layer in range(LAYERS)]


def reversed_layers() -> list[torch.Tensor]:
    return one_buffer()[::-1]


def caches(tensors: list[torch.Tensor]) -> CanonicalKVCaches:
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors], [])


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=generator, dtype=torch.int8))


def block_bytes(tensors: list[torch.Tensor], block: int) -> bytes:
    return b"".join(tensor[block].numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("layout", [one_buffer, separate, unequal, reversed_layers])
def test_a_block_is_its_pages_layer_after_layer(layout: object) -> None:
    assert callable(layout)
    tensors = layout()
    fill(tensors, 1)
    pool = PoolBlocks(caches(tensors))
    before = [block_bytes(tensors, block) for block in range(BLOCKS)]
    row = np.zeros(pool.block_bytes, np.uint8)
    pool.store(2, row)
    assert row.tobytes() == before[2]
    pool.load(5, row)
    after = [block_bytes(tensors, block) for block in range(BLOCKS)]
    assert after == [*before[:5], before[2], before[6]]


def test_layers_of_one_buffer_are_copied_in_one_call() -> None:
    assert len(PoolBlocks(caches(one_buffer()))._views) == 1
    assert len(PoolBlocks(caches(unequal()))._views) == LAYERS


@pytest.mark.parametrize(
    ("first", "blocks", "chunks", "per_chunk", "pairs"),
    [
        (0, [4, 5], [8, 9], 1, [(4, 8, 0), (5, 9, 0)]),
        (3, [4], [8], 1, [(4, 8, 0)]),
        (0, [4, 5, 6, 7], [8, 9], 2, [(4, 8, 0), (5, 8, 1), (6, 9, 0), (7, 9, 1)]),
        (3, [4, 5], [8, 9], 2, [(4, 8, 1), (5, 9, 0)]),  # begins and ends within a chunk
        (2, [4], [8], 3, [(4, 8, 2)]),
        (0, [], [], 2, []),
    ],
)
def test_matched_blocks(
    first: int,
    blocks: list[int],
    chunks: list[int],
    per_chunk: int,
    pairs: list[tuple[int, int, int]],
) -> None:
    in_pool = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
    assert list(matched_blocks(in_pool, CPULoadStoreSpec(chunks), per_chunk)) == pairs


def test_sides_that_do_not_match_are_an_error() -> None:
    in_pool = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    with pytest.raises(ValueError, match="do not match"):
        list(matched_blocks(in_pool, CPULoadStoreSpec([1, 2]), 1))


class TestWorker:
    @pytest.fixture
    def tensors(self) -> list[torch.Tensor]:
        return one_buffer()

    @pytest.fixture
    def worker(self, tensors: list[torch.Tensor]) -> Iterator[HostOffloadingWorker]:
        pool = PoolBlocks(caches(tensors))
        region = OffloadRegion(uuid.uuid4().hex, 9, pool.block_bytes)
        worker = HostOffloadingWorker(pool, region, 1)
        yield worker
        worker.shutdown()

    def submit(self, worker: HostOffloadingWorker, job: int, block: int, chunk: int) -> None:
        in_pool = GPULoadStoreSpec([block], group_sizes=[1], block_indices=[0])
        if job % 2:
            worker.submit_store(job, in_pool, CPULoadStoreSpec([chunk]))
        else:
            worker.submit_load(job, CPULoadStoreSpec([chunk]), in_pool)

    def finish(self, worker: HostOffloadingWorker, job: int) -> TransferResult:
        worker.wait({job, job + 1000})
        (result,) = worker.get_finished()
        assert worker.get_finished() == []
        assert result.job_id == job
        return result

    def test_random_transfers_against_a_model(
        self, worker: HostOffloadingWorker, tensors: list[torch.Tensor]
    ) -> None:
        fill(tensors, 2)
        chance = random.Random(3)
        model = {("pool", b): block_bytes(tensors, b) for b in range(BLOCKS)}
        model |= {("tier", c): bytes(len(model["pool", 0])) for c in range(9)}
        for job in range(100):
            block, chunk = chance.randrange(BLOCKS), chance.randrange(9)
            self.submit(worker, job, block, chunk)
            result = self.finish(worker, job)
            assert (result.success, result.transfer_size) == (True, LAYERS * PAGE)
            if job % 2:
                model["tier", chunk] = model["pool", block]
            else:
                model["pool", block] = model["tier", chunk]
            assert block_bytes(tensors, block) == model["pool", block]
        assert [block_bytes(tensors, b) for b in range(BLOCKS)] == [
            model["pool", b] for b in range(BLOCKS)
        ]

    def test_wait_waits_for_a_store_that_has_not_begun(
        self, worker: HostOffloadingWorker, tensors: list[torch.Tensor]
    ) -> None:
        """A block is given to another request only when its store is over."""
        gate, store = threading.Event(), PoolBlocks.store

        def slow(pool: PoolBlocks, *arguments: object) -> None:
            gate.wait(10)
            store(pool, *arguments)  # type: ignore[arg-type]

        with patch.object(PoolBlocks, "store", slow):
            self.submit(worker, 1, 0, 0)
            self.submit(worker, 3, 1, 1)
            assert worker.get_finished() == []
            threading.Timer(0.01, gate.set).start()
            worker.wait({3})
        assert [result.job_id for result in worker.get_finished()] == [1, 3]

    @pytest.mark.parametrize("job", [1, 2])
    def test_a_failure_is_reported_and_the_next_job_runs(
        self, worker: HostOffloadingWorker, job: int
    ) -> None:
        self.submit(worker, job, BLOCKS, 0)  # no such block
        assert not self.finish(worker, job).success
        self.submit(worker, job + 2, 0, 0)
        assert self.finish(worker, job + 2).success


class TestRegion:
    def test_two_sides_see_the_same_bytes_and_leave_no_name(self) -> None:
        name = uuid.uuid4().hex
        first = OffloadRegion(name, 2, 64)
        second = OffloadRegion(name, 2, 64)
        first.rows_CB[1, 3] = 9
        assert second.create_kv_memoryview()[1, 3] == 9
        assert not first._link.is_symlink()
        first.cleanup()
        first.cleanup()
        second.rows_CB[0, 0] = 1  # still there for the other side
        second.cleanup()

    def test_a_link_that_leads_nowhere_is_replaced(self) -> None:
        name = uuid.uuid4().hex
        probe = OffloadRegion(name, 1, 64)
        link = probe._link
        probe.cleanup()
        assert not link.is_symlink()
        for target in ("/proc/1/fd/99999", "/dev/null"):
            link.symlink_to(target)
            first, second = OffloadRegion(name, 1, 64), OffloadRegion(name, 1, 64)
            first.rows_CB[0, 0] = 7
            assert second.rows_CB[0, 0] == 7
            first.cleanup()
            second.cleanup()
