# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV pool and the memory tier, beside the running programs."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from rbln_vllm.distributed.kv_transfer.offload.pool_blocks import PoolBlocks
from rbln_vllm.distributed.kv_transfer.offload.region import OffloadRegion
from rbln_vllm.distributed.kv_transfer.offload.threads import STORE_NICENESS, background_executor

logger = init_logger("vllm.rbln.offload")

Copy = Callable[[int, NDArray[np.uint8]], None]


class HostOffloadingWorker(OffloadingWorker):
    """One thread that loads and one, of lower priority, that stores.

    Order against the programs is the connector's: a store is submitted after the step that
    completed its blocks, and waited for before a step that writes to them again; a request whose
    blocks are being loaded is not scheduled.
    """

    def __init__(self, pool: PoolBlocks, region: OffloadRegion, blocks_per_chunk: int) -> None:
        self._pool, self._region, self._blocks_per_chunk = pool, region, blocks_per_chunk
        self._loads = background_executor("rbln-kv-load")
        self._stores = background_executor("rbln-kv-store", niceness=STORE_NICENESS)
        self._done: SimpleQueue[TransferResult] = SimpleQueue()
        self._running: dict[int, threading.Event] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._submit(self._stores, job_id, self._pool.store, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._submit(self._loads, job_id, self._pool.load, dst_spec, src_spec)
        return True

    def get_finished(self, patience: float = 0.0) -> list[TransferResult]:
        """Every job that has ended. Waits up to ``patience`` seconds for the first of them."""
        results: list[TransferResult] = []
        while True:
            try:
                results.append(self._done.get(timeout=0.0 if results else patience))
            except Empty:
                break
        for result in results:
            del self._running[result.job_id]
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs are done; those that are not known were so long ago."""
        for job_id in job_ids:
            if (event := self._running.get(job_id)) is not None:
                event.wait()

    def shutdown(self) -> None:
        """Ends what runs and drops what waits."""
        for executor in (self._loads, self._stores):
            executor.shutdown(wait=True, cancel_futures=True)
        self._region.cleanup()

    def _submit(
        self,
        executor: ThreadPoolExecutor,
        job_id: int,
        copy: Copy,
        in_pool: GPULoadStoreSpec,
        in_memory: LoadStoreSpec,
    ) -> None:
        assert isinstance(in_memory, BlockIDsLoadStoreSpec)
        pairs = list(matched_blocks(in_pool, in_memory, self._blocks_per_chunk))
        event = self._running[job_id] = threading.Event()
        executor.submit(self._run, job_id, copy, pairs, event)

    def _run(
        self, job_id: int, copy: Copy, pairs: list[tuple[int, int, int]], event: threading.Event
    ) -> None:
        size, started = self._pool.block_bytes, time.perf_counter()
        success = False
        try:
            for block, chunk, part in pairs:
                copy(block, self._region.rows_CB[chunk, part * size : (part + 1) * size])
            success = True
        except (ValueError, IndexError, MemoryError):
            logger.exception("KV offload: job %d failed", job_id)
        finally:
            seconds = time.perf_counter() - started
            self._done.put(TransferResult(job_id, success, len(pairs) * size, seconds))
            event.set()


def matched_blocks(
    in_pool: GPULoadStoreSpec, in_memory: BlockIDsLoadStoreSpec, blocks_per_chunk: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (block of the pool, chunk of the tier, which of the chunk's blocks).

    A chunk holds ``blocks_per_chunk`` blocks that follow each other in a request. A transfer may
    begin and end within a chunk: ``block_indices`` says where in the request each group begins.
    """
    blocks, chunks = iter(in_pool.block_ids.tolist()), iter(in_memory.block_ids.tolist())
    for count, first in zip(in_pool.group_sizes, in_pool.block_indices, strict=True):
        chunk = -1
        for index in range(first, first + count):
            if index == first or index % blocks_per_chunk == 0:
                chunk = next(chunks)
            yield next(blocks), chunk, index % blocks_per_chunk
    if next(blocks, None) is not None or next(chunks, None) is not None:
        raise ValueError("the two sides of a KV transfer do not match")
