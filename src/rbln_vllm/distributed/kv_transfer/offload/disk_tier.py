# SPDX-License-Identifier: Apache-2.0
"""The directory on disk as the tier below memory, in the terms of vLLM's tiering manager.

A block is read into the memory tier, checked there, and only then counts as present: whatever
goes wrong with a file, its block is a miss and is computed.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector, DropStorePolicy
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob

from rbln_vllm.distributed.kv_transfer.offload.block_file import DamagedBlockError
from rbln_vllm.distributed.kv_transfer.offload.disk_store import DiskStore
from rbln_vllm.distributed.kv_transfer.offload.rate_limit import RateLimit
from rbln_vllm.distributed.kv_transfer.offload.threads import STORE_NICENESS, background_executor

logger = init_logger("vllm.rbln.offload")

SECONDS_BETWEEN_WARNINGS = 10.0
SECONDS_WITHOUT_WRITES = 10.0
"""How long the directory is left alone after a write has failed."""


class PendingWrites(BackpressureDetector):
    """Blocks that wait to be written stay in memory: at most half of it may hold such blocks."""

    def __init__(self, most_blocks: int) -> None:
        super().__init__(DropStorePolicy())
        self._most, self._pending = most_blocks, 0

    @property
    def stats(self) -> dict[str, float]:
        return {"pending_blocks": float(self._pending)}

    def submitted(self, blocks: int) -> None:
        self._pending += blocks

    def finished(self, blocks: int) -> None:
        self._pending -= blocks

    def is_under_pressure(self) -> bool:
        return self._pending > self._most

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """What counts is what waits, not how long it took."""

    def reset(self) -> None:
        """Nothing: jobs that were submitted still finish."""


class DiskTier(SecondaryTierManager):
    """Runs on the scheduler's thread; files are read and written on threads of its own."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, spec: OffloadingSpec, primary_kv_view: memoryview, store: DiskStore, readers: int
    ) -> None:
        self._pending = PendingWrites(max(1, len(primary_kv_view) // 2))
        super().__init__(spec, primary_kv_view, "disk", self._pending)
        self._bytes = primary_kv_view.cast("B")
        self._store = store
        self._readers = background_executor("rbln-kv-read", readers)
        self._writer = background_executor("rbln-kv-write", niceness=STORE_NICENESS)
        self._running: dict[JobId, tuple[Future[None], int]] = {}
        self._done: SimpleQueue[JobResult] = SimpleQueue()
        self._warnings = RateLimit(SECONDS_BETWEEN_WARNINGS)
        self._no_writes_before = 0.0

    def has(self, key: OffloadKey) -> bool:
        """Whether a file of that name is there; its content is checked when it is read."""
        return self._store.has(key)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        blocks = len(job_metadata.keys)
        self._pending.submitted(blocks)
        future = self._writer.submit(self._run, job_metadata, self._write)
        self._running[job_metadata.job_id] = (future, blocks)

    def submit_load(self, job_metadata: TransferJob) -> None:
        future = self._readers.submit(self._run, job_metadata, self._read)
        self._running[job_metadata.job_id] = (future, 0)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                results.append(self._done.get_nowait())
            except Empty:
                break
        for result in results:
            _, written = self._running.pop(result.job_id)
            self._pending.finished(written)
        return results

    def drain_jobs(self) -> None:
        wait(future for future, _ in list(self._running.values()))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def shutdown(self) -> None:
        """Ends what runs and drops what waits: a block that was not written is a miss later."""
        for executor in (self._readers, self._writer):
            executor.shutdown(wait=True, cancel_futures=True)
        self._bytes.release()

    def _run(self, job: TransferJob, move: Callable[[OffloadKey, memoryview], bool]) -> None:
        """Moves every block of ``job``; one that fails does not keep the others back."""
        started = time.perf_counter()
        moved: list[OffloadKey] = []
        try:
            for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
                start = chunk * self.block_size_bytes
                if move(key, self._bytes[start : start + self.block_size_bytes]):
                    moved.append(key)
        finally:
            seconds = time.perf_counter() - started
            size = len(moved) * self.block_size_bytes
            success = len(moved) == len(job.keys)
            self._done.put(JobResult(job.job_id, success, tuple(moved) or None, seconds, size))

    def _read(self, key: OffloadKey, row: memoryview) -> bool:
        try:
            self._store.read(key, row)
        except (DamagedBlockError, OSError) as error:
            self._warn("a stored block is not used and will be computed", error)
            return False
        return True

    def _write(self, key: OffloadKey, row: memoryview) -> bool:
        if time.monotonic() < self._no_writes_before:
            return False
        try:
            self._store.write(key, row)
        except OSError as error:
            self._no_writes_before = time.monotonic() + SECONDS_WITHOUT_WRITES
            self._warn("a block could not be stored; serving goes on without it", error)
            return False
        return True

    def _warn(self, what: str, error: Exception) -> None:
        if (silent := self._warnings.passes()) is not None:
            logger.warning(
                "KV offload: %s: %s (%d more since the last warning)", what, error, silent
            )
