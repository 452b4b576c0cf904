# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the connector."""

import time
from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import TransferResult

from rbln_vllm.distributed.kv_transfer.offload.spec import HostOffloadingSpec
from rbln_vllm.distributed.kv_transfer.offload.worker import HostOffloadingWorker

IDLE_SECONDS = 0.001
"""How long a step without programs waits for a transfer, instead of taking the threads' time."""


@dataclass
class OffloadMeta(OffloadingConnectorMetadata):
    """Upstream's orders for one step, whose they are, and what else happens in the step."""

    engine_id: str = ""
    prefill_tokens: int = 0
    is_idle: bool = False
    """No program runs: all there is to do is to wait for transfers."""


@dataclass
class OffloadWorkerMeta(OffloadingWorkerMetadata):
    """Upstream's report of finished jobs, which of them failed, and what prefill took."""

    failed_jobs: set[int] = field(default_factory=set)
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadWorkerMeta":
        assert isinstance(other, OffloadWorkerMeta)
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        return OffloadWorkerMeta(
            both.completed_jobs,
            both.transfer_stats,
            self.failed_jobs | other.failed_jobs,
            max(self.prefill_tokens, other.prefill_tokens),
            max(self.prefill_seconds, other.prefill_seconds),
        )


class OffloadWorkerSide(OffloadingConnectorWorker):
    """Upstream's, for transfers that may fail and loads that begin early."""

    worker: HostOffloadingWorker | None

    def __init__(
        self, spec: HostOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._failed_jobs: set[int] = set()
        self._failed_requests: set[str] = set()
        self._step_began, self._prefill_tokens, self._prefill_seconds = 0.0, 0, 0.0
        self._patience = 0.0

    def check_owner(self, metadata: KVConnectorMetadata) -> None:
        """Raises RuntimeError for another engine's orders: vLLM has one connector a process."""
        assert isinstance(metadata, OffloadMeta)
        if metadata.engine_id != self.spec.config.engine_id:
            raise RuntimeError(
                "two engines with KV offload cannot share one process: unset "
                "VLLM_ENABLE_V1_MULTIPROCESSING, or shut the first one down"
            )

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads; upstream's turn to do so then finds none."""
        assert isinstance(metadata, OffloadMeta)
        self.start_kv_transfers(metadata)
        metadata.load_jobs = {}
        self._prefill_tokens, self._prefill_seconds = metadata.prefill_tokens, 0.0
        self._patience = IDLE_SECONDS if metadata.is_idle else 0.0
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        """The programs of the step have run."""
        if self._prefill_tokens > 1:
            self._prefill_seconds = time.monotonic() - self._step_began

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, also those that failed (upstream asserts none does)."""
        assert self.worker is not None
        received: set[str] = set()
        for result in self.worker.get_finished(self._patience):
            request_id = self._load_jobs.pop(result.job_id, None)
            self._record(result, is_load=request_id is not None)
            self._connector_worker_meta.mark_completed(result.job_id)
            if request_id is not None:
                received.add(request_id)
            if not result.success:
                self._failed_jobs.add(result.job_id)
                self._failed_requests |= {request_id} if request_id is not None else set()
        return set(), received

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def discard_stores(self) -> None:
        """Gives up the stores that wait for the next step, as failed."""
        for job_id, _, _ in self._unsubmitted_store_jobs:
            self._connector_worker_meta.mark_completed(job_id)
            self._failed_jobs.add(job_id)
        self._unsubmitted_store_jobs.clear()

    def build_connector_worker_meta(self) -> OffloadWorkerMeta | None:
        """What happened since the last call; None when nothing did."""
        meta = super().build_connector_worker_meta()
        if meta is None and not self._prefill_seconds:
            return None
        meta = meta or OffloadingWorkerMetadata()
        failed, self._failed_jobs = self._failed_jobs, set()
        seconds, self._prefill_seconds = self._prefill_seconds, 0.0
        tokens = self._prefill_tokens if seconds else 0
        return OffloadWorkerMeta(meta.completed_jobs, meta.transfer_stats, failed, tokens, seconds)

    def _record(self, result: TransferResult, is_load: bool) -> None:
        stats = self._connector_worker_meta.transfer_stats
        if result.success and result.transfer_size and result.transfer_time is not None:
            direction = stats.load if is_load else stats.store
            direction.record(result.transfer_size, result.transfer_time)
