# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector over LMCache, for a pool in this machine's memory."""

import sys
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.logger import init_logger

from rbln_vllm import envs, shims
from rbln_vllm.distributed.kv_transfer.lmcache.rules import check_pool
from rbln_vllm.distributed.kv_transfer.lmcache.settings import check, settle
from rbln_vllm.distributed.kv_transfer.lmcache.unloaded import evict_unloaded
from rbln_vllm.distributed.kv_transfer.offload.identity import identity_of
from rbln_vllm.models.content import cache_key
from rbln_vllm.toolchain import host_toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from rbln_vllm.distributed.kv_transfer.lmcache.metadata import StepOrders
    from rbln_vllm.distributed.kv_transfer.lmcache.scheduler_side import SchedulerSide
    from rbln_vllm.distributed.kv_transfer.lmcache.worker_side import WorkerSide

logger = init_logger("vllm.rbln.lmcache")


class RBLNLMCacheConnectorV1(LMCacheConnectorV1):
    """Loads before a step and saves after it, in the engine's own thread.

    Raises ValueError at start for a configuration it cannot serve and RuntimeError when LMCache
    cannot store, where LMCache itself would go on and never hit.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        # Here, not above: vLLM loads this module when it checks its configuration, in processes
        # that never need LMCache and before its worker has looked through all modules.
        from lmcache.integration.vllm.utils import lmcache_get_or_create_config

        from rbln_vllm.distributed.kv_transfer.lmcache.scheduler_side import SchedulerSide
        from rbln_vllm.distributed.kv_transfer.lmcache.worker_side import (
            WorkerSide,
            build_engine,
            start_method_kept,
        )

        check_pool(kv_cache_config)
        shims.forget_lmcache_config()
        shims.without_lmcache_offload_server()
        config = lmcache_get_or_create_config()
        works = role is KVConnectorRole.WORKER
        self._identity = _identity(vllm_config) if works else ""
        self._settle(config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._running: set[str] = set()
        with start_method_kept():
            engine = build_engine(config, vllm_config) if works else None
            super().__init__(vllm_config, role, kv_cache_config)
        self._settle(config)  # once more: the adapter has applied kv_connector_extra_config
        self._check_health()
        if engine is not None:
            self._worker = WorkerSide(engine, vllm_config.cache_config.block_size)
        else:
            self._scheduler = SchedulerSide(self._lmcache_engine)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is only computed again."""
        return False

    # -- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        worker = self._of_worker()
        worker.register(kv_caches)
        super().register_kv_caches(kv_caches)
        self._check_health()
        worker.end_with_process()
        if fault := worker.storage_fault():
            self.shutdown()
            raise RuntimeError(fault)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._of_worker().load(self._orders())

    def wait_for_save(self) -> None:
        # A forward pass that raised has computed nothing: vLLM calls this on the way out.
        self._of_worker().save(self._orders(), computed=sys.exception() is None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker().take_unloaded()

    # -- scheduler --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._of_scheduler().matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._running.add(request.request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._of_scheduler().orders(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        if blocks := connector_output.invalid_block_ids:
            evict_unloaded(self._kv_cache_manager, self._running, blocks)
            self._of_scheduler().recovered(blocks)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._of_scheduler().finished(request)
        self._running.discard(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return answer

    def reset_cache(self) -> bool:
        """Drop everything stored, in memory and of this model on disk, before the next load."""
        self._of_scheduler().clear()
        return True

    # -- both -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End LMCache's threads, which would keep the process; upstream's connector does not."""
        self._lmcache_engine.shutdown()
        shims.forget_lmcache_config()

    def _settle(self, config: Any) -> None:
        check(config)
        settle(config, self._identity)

    def _check_health(self) -> None:
        """RuntimeError when LMCache has failed to start; it has said so only in its log."""
        manager = self._lmcache_engine._manager
        if manager.is_healthy():
            return
        self.shutdown()
        raise RuntimeError(
            f"LMCache could not start and would never store anything: {manager._init_failed_reason}"
        )

    def _orders(self) -> "StepOrders":
        return cast("StepOrders", self._get_connector_metadata())

    def _of_worker(self) -> "WorkerSide":
        assert self._worker is not None
        return self._worker

    def _of_scheduler(self) -> "SchedulerSide":
        assert self._scheduler is not None
        return self._scheduler


def _identity(vllm_config: "VllmConfig") -> str:
    """Hex digest of what KV depends on besides tokens and tags; chunks on disk outlive engines."""
    toolchain = host_toolchain()
    cache = toolchain.cache(envs.cache_root() / "rbln", logger)
    parts = dict(cache_key(vllm_config, toolchain, cache.digest).parts)
    return identity_of({**parts, "format": "lmcache 1"}).hex()
