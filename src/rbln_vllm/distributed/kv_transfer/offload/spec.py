# SPDX-License-Identifier: Apache-2.0
"""The offloading spec: what vLLM's connector makes its manager and its worker from."""

from collections.abc import Mapping
from dataclasses import replace

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from rbln_vllm.distributed.kv_transfer.offload.costs import Costs
from rbln_vllm.distributed.kv_transfer.offload.disk_store import DiskStore
from rbln_vllm.distributed.kv_transfer.offload.disk_tier import DiskTier
from rbln_vllm.distributed.kv_transfer.offload.identity import identity_of
from rbln_vllm.distributed.kv_transfer.offload.manager import OffloadManager
from rbln_vllm.distributed.kv_transfer.offload.options import GIB, STAGING_BYTES, OffloadOptions
from rbln_vllm.distributed.kv_transfer.offload.pool_blocks import PoolBlocks
from rbln_vllm.distributed.kv_transfer.offload.region import OffloadRegion
from rbln_vllm.distributed.kv_transfer.offload.worker import HostOffloadingWorker
from rbln_vllm.worker.memory import HostMemory

logger = init_logger("vllm.rbln.offload")


class HostOffloadingSpec(TieringOffloadingSpec):
    """Memory and disk tiers of the ``HOST`` device.

    Upstream's specs make a worker that copies on CUDA streams, and a region in /dev/shm.
    """

    def __init__(
        self, config: OffloadingConfig, block_identity: Mapping[str, str], max_model_len: int
    ) -> None:
        """``block_identity``: see ``identity.describe_blocks``; unused without a directory.

        Raises ValueError for options that cannot work.
        """
        self.options = OffloadOptions.parse(config.extra_config)
        self._block_identity = dict(block_identity)
        self.costs = Costs()
        memory = self.options.cpu_bytes or self._staging_bytes(config, max_model_len)
        extra = {**config.extra_config, "cpu_bytes_to_use": memory}
        super().__init__(replace(config, extra_config=extra))
        self._check_room()

    def get_manager(self) -> OffloadManager:
        """For the scheduler: the books of both tiers. Raises OSError when either cannot be had."""
        self._check_memory()
        region, events = self._region(), self.kv_events_config
        memory = CPUPrimaryTierOffloadingManager(
            num_chunks=self.num_chunks,
            mmap_region=region,  # the two methods it uses are alike
            cache_policy=self.eviction_policy,
            cache_policy_module_path=self.cache_policy_module_path,
            # Without a block's tokens an event tells a router nothing, and its other size of
            # block would confuse one that counts in sub-blocks.
            enable_events=events.enable_kv_cache_events and events.self_describing_kv_events,
        )
        manager: OffloadingManager = OffloadManager(memory, self._disk_tier(memory), self.costs)
        self._log_tiers()
        assert isinstance(manager, OffloadManager)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        pool = PoolBlocks(kv_caches)
        if pool.block_bytes * self.blocks_per_chunk > self.kv_bytes_per_chunk:
            raise RuntimeError(
                f"a block of the KV pool has {pool.block_bytes} bytes, but the offload tiers were "
                f"laid out for {self.kv_bytes_per_chunk // self.blocks_per_chunk}"
            )
        return HostOffloadingWorker(pool, self._region(), self.blocks_per_chunk)

    def _region(self) -> OffloadRegion:
        return OffloadRegion(self.config.engine_id, self.num_chunks, self.kv_bytes_per_chunk)

    def _disk_tier(self, memory: CPUPrimaryTierOffloadingManager) -> DiskTier | None:
        directory = self.options.disk_directory
        if directory is None:
            return None
        try:
            store = DiskStore(
                directory,
                identity_of(self._block_identity),
                self.options.disk_bytes,
                self._block_identity,
            )
        except OSError as error:
            raise ValueError(
                f"KV offload: disk_directory {directory} cannot be used: {error}. Give a "
                "directory that this user may write to"
            ) from error
        return DiskTier(self, memory.get_kv_memoryview(), store, self.options.disk_read_threads)

    def _staging_bytes(self, config: OffloadingConfig, max_model_len: int) -> int:
        """Room for one longest sequence that is read and one that is written, at least."""
        per_chunk = config.cache.blocks_per_chunk
        chunks = 2 * (max_model_len // (per_chunk * config.groups[0].tokens_per_block) + 1)
        chunk = config.worker_kv_bytes_per_block * per_chunk + self.BLOCK_SIZE_ALIGNMENT
        return int(max(STAGING_BYTES, chunks * chunk))

    def _check_room(self) -> None:
        options, chunk = self.options, self.kv_bytes_per_chunk
        if self.num_chunks < 1:
            raise ValueError(
                f"KV offload: one chunk takes {chunk / GIB:.3f} GiB, more than the memory it may "
                "use: raise --kv-offloading-size (cpu_bytes_to_use)"
            )
        if options.disk_directory is not None and options.disk_bytes < 2 * chunk:
            raise ValueError(
                f"KV offload: one chunk takes {chunk / GIB:.3f} GiB: disk_bytes_to_use must hold "
                "at least two"
            )

    def _check_memory(self) -> None:
        """Pages are taken as they fill, so that too much would end the process only then."""
        asked, free = self.num_chunks * self.kv_bytes_per_chunk, HostMemory.now().available
        if asked > free:
            raise ValueError(
                f"KV offload may take {asked / GIB:.2f} GiB of memory, but only {free / GIB:.2f} "
                "GiB are free: lower --kv-offloading-size (cpu_bytes_to_use)"
            )

    def _log_tiers(self) -> None:
        options, blocks = self.options, self.num_chunks
        kind = "memory" if options.cpu_bytes else "staging memory"
        disk = (
            f"; up to {options.disk_bytes / GIB:.2f} GiB in {options.disk_directory}"
            if options.disk_directory
            else ""
        )
        logger.info(
            "KV offload: %.2f GiB of %s (%d chunks of %d bytes)%s",
            blocks * self.kv_bytes_per_chunk / GIB,
            kind,
            blocks,
            self.kv_bytes_per_chunk,
            disk,
        )
