# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector on this device.

Upstream's connector is used as it is, but for this: its spec is ours, a load must be worth it
(``planner``), transfers may fail, and loads start with a step instead of after its forward pass.
"""

from collections.abc import Collection
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from rbln_vllm.distributed.kv_transfer.offload.identity import describe_blocks
from rbln_vllm.distributed.kv_transfer.offload.planner import ChunkShape, LoadPlanner
from rbln_vllm.distributed.kv_transfer.offload.scheduler_side import OffloadScheduler
from rbln_vllm.distributed.kv_transfer.offload.spec import HostOffloadingSpec
from rbln_vllm.distributed.kv_transfer.offload.worker_side import OffloadWorkerSide


class OffloadingConnector(upstream.OffloadingConnector):
    """Its name is upstream's, which users give; vLLM is told this module's path beside it."""

    connector_scheduler: OffloadScheduler | None
    connector_worker: OffloadWorkerSide | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not upstream's: it makes the spec from names alone, and ours must know the model.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        on_disk = "disk_directory" in config.extra_config and role == KVConnectorRole.SCHEDULER
        identity = describe_blocks(vllm_config, kv_cache_config, config) if on_disk else {}
        spec = HostOffloadingSpec(config, identity, vllm_config.model_config.max_model_len)
        self.connector_scheduler, self.connector_worker = None, None
        self._planner: LoadPlanner | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadScheduler(spec, vllm_config, kv_cache_config)
            self._planner = _planner(spec, self.connector_scheduler, kv_cache_config)
        else:
            self.connector_worker = OffloadWorkerSide(spec, vllm_config, kv_cache_config)

    # -- scheduler ---------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._planner is not None:
            self._planner.admitted(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._planner is not None:
            self._planner.finished(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(
            request, block_ids
        )
        return answer

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._planner is not None:
            for request_id in connector_output.failed_recving:
                self._planner.load_failed(request_id)
        super().update_connector_output(connector_output)

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Also how far loading is worth it."""
        bound: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        if self._planner is None:
            return bound
        worth = self._planner.loadable_tokens(
            request.request_id, request.block_hashes, request.num_tokens, num_computed_tokens
        )
        return worth if bound is None else min(bound, worth)

    # -- worker ------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before a step: what must be stored first is, and then loads may begin.

        Upstream begins them after the forward pass, which takes long on a CPU.
        """
        assert self.connector_worker is not None
        self.connector_worker.check_owner(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)
        self.connector_worker.begin_step(kv_connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        self.connector_worker.end_step()
        sent, received = self.connector_worker.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=self.connector_worker.take_failed_requests(),
        )

    def discard_stores(self) -> None:
        """The step was refused: it has not computed the blocks it was to store."""
        assert self.connector_worker is not None
        self.connector_worker.discard_stores()


def _planner(
    spec: HostOffloadingSpec, scheduler: OffloadScheduler, kv_cache_config: KVCacheConfig
) -> LoadPlanner | None:
    """None where the stored tokens of a prompt are no prefix: windows of sliding attention."""
    groups: Collection[Any] = spec.config.groups
    group = spec.config.groups[0]
    cache = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
    if len(groups) != 1 or type(cache) is not FullAttentionSpec:
        return None
    tokens = group.tokens_per_block * spec.blocks_per_chunk
    shape = ChunkShape(
        tokens, tokens // spec.tokens_per_hash, spec.kv_bytes_per_chunk, group.group_id
    )
    return LoadPlanner(scheduler.manager, spec.costs, spec.options.load_policy, shape)
