# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of memory and disk tiers, with what a load must be decided by."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    JobMetadata,
    TieringOffloadingManager,
)

from rbln_vllm.distributed.kv_transfer.offload.costs import Costs, Tier
from rbln_vllm.distributed.kv_transfer.offload.disk_tier import DiskTier


@dataclass
class _Promoted:
    """Blocks that were read from disk on behalf of one request."""

    keys: set[OffloadKey] = field(default_factory=set)


class OffloadManager(TieringOffloadingManager):
    """Memory, and a directory below it if there is one."""

    def __init__(
        self, memory: CPUPrimaryTierOffloadingManager, disk: DiskTier | None, costs: Costs
    ) -> None:
        super().__init__(memory, [disk] if disk is not None else [])
        self._disk, self._costs = disk, costs

    @property
    def memory_blocks(self) -> int:
        return int(self.primary_tier._num_chunks)

    def tier_of(self, key: OffloadKey, req_context: ReqContext) -> Tier | None:
        """Where a block is, or is about to be; starts nothing."""
        self._maybe_process_finished_jobs()
        if self.primary_tier.lookup(key, req_context) is not LookupResult.MISS:
            return Tier.MEMORY
        return Tier.DISK if self._disk is not None and self._disk.has(key) else None

    def lookup(
        self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        """As upstream, but reads a block from disk once per request at most.

        A block whose file cannot be read, or that others push out of memory before it is used,
        would otherwise be read again and again while the request waits.
        """
        self._maybe_process_finished_jobs()
        promoted = req_context.get_state(_Promoted)
        if promoted is None:
            req_context.set_state(promoted := _Promoted())
        if self.primary_tier.lookup(key, req_context) is LookupResult.MISS:
            if key in promoted.keys:
                return LookupResult.MISS
            promoted.keys.add(key)
        return super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The request is admitted: should it be preempted, its blocks may be read once more."""
        req_context.set_state(_Promoted())
        return super().prepare_load(keys, req_context)

    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        """Also notes how long the request waited for the disk."""
        waited = time.monotonic() - job_metadata.transfer_job.submit_time
        self._costs.loads[Tier.DISK].observe(completed_job.transfer_bytes or 0, waited)
        super()._complete_promotion(job_metadata, completed_job)
