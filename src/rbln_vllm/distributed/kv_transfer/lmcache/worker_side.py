# SPDX-License-Identifier: Apache-2.0
"""The worker's half: LMCache's engine over the KV pool, loads before a step and saves after it."""

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.utils import ENGINE_NAME
from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory
from lmcache.integration.vllm.vllm_v1_adapter import ReqMeta
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from rbln_vllm.distributed.kv_transfer.lmcache.ending import stop_with_main_thread
from rbln_vllm.distributed.kv_transfer.lmcache.metadata import StepOrders
from rbln_vllm.distributed.kv_transfer.lmcache.settings import DISK, uses_disk
from rbln_vllm.distributed.kv_transfer.lmcache.token_keys import StableTokenDatabase
from rbln_vllm.distributed.kv_transfer.lmcache.transfer import ChunkShape, PoolTransfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.rbln.lmcache")


@contextmanager
def start_method_kept() -> Iterator[None]:
    """LMCache sets Python's start method of processes to spawn for the whole process."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def build_engine(config: Any, vllm_config: "VllmConfig") -> LMCacheEngine:
    """LMCache's engine with our transfer, registered under the name its adapter looks for.

    LMCache has no transfer for CPU, and its adapter goes on without an engine when none is made.
    """
    metadata = VllmServiceFactory(config, vllm_config, "worker").get_or_create_metadata()
    group = get_tp_group()
    engine = LMCacheEngineBuilder.get_or_create(
        ENGINE_NAME,
        config,
        metadata,
        PoolTransfer(ChunkShape.of(metadata)),
        group.broadcast,
        group.broadcast_object,
    )
    engine.token_database = StableTokenDatabase(config, metadata)
    return engine


class WorkerSide:
    """Carries out a step's orders, and remembers which blocks could not be loaded."""

    def __init__(self, engine: LMCacheEngine, block_size: int) -> None:
        self._engine = engine
        self._block_size = block_size
        self._chunk = engine.config.chunk_size
        self._layers: list[Tensor] = []
        self._unloaded: set[int] = set()  # not reported yet
        self._suspect: set[int] = set()  # a step that is scheduled may still build on them

    def register(self, kv_caches: Mapping[str, Tensor]) -> None:
        """ValueError for a pool that chunks do not fit."""
        shape = ChunkShape.of(self._engine.metadata)
        shape.check_pool(kv_caches)
        self._layers = list(kv_caches.values())

    def storage_fault(self) -> str | None:
        """What of the configured storage is missing, None when all is there."""
        manager = self._engine.storage_manager
        stores = () if manager is None else tuple(manager.storage_backends)
        wanted = ["LocalCPUBackend", *([DISK] if uses_disk(self._engine.config) else [])]
        missing = [name for name in wanted if name not in stores]
        if not missing:
            return None
        return (
            f"LMCache could not make {', '.join(missing)}, see its messages above: check that "
            "local_disk can be written to, and max_local_cpu_size and max_local_disk_size"
        )

    def end_with_process(self) -> None:
        """See that LMCache's threads end with the process even when nobody shuts it down."""
        stop_with_main_thread(self._engine.storage_manager.loop)

    def load(self, orders: StepOrders) -> None:
        """Fill the pool for the requests of this step."""
        for request_id in orders.abandoned:
            self._engine.lookup_unpin(request_id)
        self._suspect -= orders.recovered
        if orders.clear:
            self._engine.clear()
        for request in orders.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self._load(request)

    def save(self, orders: StepOrders, computed: bool) -> None:
        """Store what the step computed, unless it failed (``computed`` is False)."""
        for request in orders.requests:
            self._engine.lookup_unpin(request.req_id)
            wanted = request.save_spec is not None and request.save_spec.can_save
            if computed and wanted and self._is_sound(request):
                self._save(request)

    def take_unloaded(self) -> set[int]:
        """Blocks found since the last call to hold nothing useful."""
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def _load(self, request: ReqMeta) -> None:
        spec = request.load_spec
        end, cached = spec.lmcache_cached_tokens, spec.vllm_cached_tokens
        slots_T = request.slot_mapping[:end]
        wanted_T = torch.ones(end, dtype=torch.bool)
        wanted_T[: cached // self._chunk * self._chunk] = False
        loaded_T = self._engine.retrieve(
            request.token_ids[:end],
            wanted_T,
            kvcaches=self._layers,
            slot_mapping=slots_T,
            vllm_cached_tokens=cached,
            request_configs=request.request_configs,
            req_id=request.req_id,
        )
        self._engine.lookup_unpin(request.req_id)
        missing_T = ~loaded_T
        missing_T[:cached] = False
        blocks = slots_T[missing_T] // self._block_size
        self._unloaded.update(blocks.tolist())
        self._suspect |= self._unloaded

    def _is_sound(self, request: ReqMeta) -> bool:
        """Whether all KV of ``request`` could be loaded; what is computed on others is wrong."""
        if not self._suspect:
            return True
        blocks = set((request.slot_mapping // self._block_size).tolist())
        return not blocks & self._suspect

    def _save(self, request: ReqMeta) -> None:
        num_tokens = len(request.token_ids)
        if not request.is_last_prefill:
            num_tokens = num_tokens // self._chunk * self._chunk
        first = request.save_spec.skip_leading_tokens // self._chunk * self._chunk
        if first >= num_tokens or len(request.slot_mapping) < num_tokens:
            return
        wanted_T = torch.ones(num_tokens, dtype=torch.bool)
        wanted_T[:first] = False
        self._engine.store(
            request.token_ids[:num_tokens],
            mask=wanted_T,
            kvcaches=self._layers,
            slot_mapping=request.slot_mapping[:num_tokens],
            offset=first,
            request_configs=request.request_configs,
            req_id=request.req_id,
        )
