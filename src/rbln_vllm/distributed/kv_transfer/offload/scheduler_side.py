# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector: measures, and takes back what a worker failed at."""

import time

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from rbln_vllm.distributed.kv_transfer.offload.costs import Tier
from rbln_vllm.distributed.kv_transfer.offload.manager import OffloadManager
from rbln_vllm.distributed.kv_transfer.offload.spec import HostOffloadingSpec
from rbln_vllm.distributed.kv_transfer.offload.worker_side import OffloadMeta, OffloadWorkerMeta


class OffloadScheduler(OffloadingConnectorScheduler):
    """Upstream's, which learns what prefill and loads take and that stores may fail."""

    manager: OffloadManager

    def __init__(
        self, spec: HostOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._engine_id = spec.config.engine_id
        self._costs, self._chunk_bytes = spec.costs, spec.kv_bytes_per_chunk
        self._load_began: dict[int, float] = {}

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        before = self._job_counter
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        for job_id in range(before, self._job_counter):
            self._load_began[job_id] = time.monotonic()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        tokens = scheduler_output.num_scheduled_tokens
        # A step of one request with more than one token is a chunk of prefill.
        prefill = max(tokens.values()) if len(tokens) == 1 else 0
        return OffloadMeta(
            meta.load_jobs,
            meta.store_jobs,
            meta.jobs_to_flush,
            self._engine_id,
            prefill,
            is_idle=not tokens,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, OffloadWorkerMeta):
            self._costs.prefill.observe(meta.prefill_tokens, meta.prefill_seconds)
            self._observe_loads(meta)
            for job_id in meta.failed_jobs:
                self._take_back(job_id)
        super().update_connector_output(connector_output)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._load_began.clear()

    def _observe_loads(self, meta: OffloadWorkerMeta) -> None:
        for job_id in meta.completed_jobs:
            began = self._load_began.pop(job_id, None)
            job = self._jobs.get(job_id)
            if began is not None and job is not None and job_id not in meta.failed_jobs:
                size = len(job.keys) * self._chunk_bytes
                self._costs.loads[Tier.MEMORY].observe(size, time.monotonic() - began)

    def _take_back(self, job_id: int) -> None:
        """Drops the blocks of a store that failed; upstream then completes a job of none."""
        job = self._jobs.get(job_id)
        if job is None or not job.is_store:
            return
        context = self._req_status[job.req_id].req_context
        self.manager.primary_tier.complete_store(job.keys, context, success=False)
        job.keys.clear()
