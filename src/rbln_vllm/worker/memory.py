# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool may be."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

from rbln_vllm.core.limits import blocks_for, check_fits
from rbln_vllm.devices import GIB, npu_kv_budget
from rbln_vllm.distributed.kv_transfer.offload.settle import offload_memory_bytes
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer, block_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEADROOM_BYTES = GIB // 2
"""Left for activations, the sampler and the server."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine (or container) and of this process."""

    total: int
    available: int
    used_by_us: int

    @classmethod
    def now(cls) -> "HostMemory":
        nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
        return cls(
            total=sum(node.total_memory for node in nodes),
            available=sum(node.available_memory for node in nodes),
            used_by_us=psutil.Process(os.getpid()).memory_info().rss,
        )


def kv_budget(
    vllm_config: "VllmConfig",
    geometry: Geometry,
    layers: tuple[KVLayer, ...],
    weight_bytes: int,
    adapter_bytes: int = 0,
) -> int:
    """Bytes for the KV pool: what the user set, else what the device has left.

    ``adapter_bytes`` are those of all slots, whose memory is taken when adapters are loaded.
    Raises ValueError when the pool the user asked for is not free on this machine, and
    MemoryError when a dry run's weights and programs do not fit the device.
    """
    cache, memory = vllm_config.cache_config, HostMemory.now()
    asked = cache.kv_cache_memory_bytes
    if asked is not None:
        return _explicit(asked, memory)
    if geometry.profile.is_dry_run:
        budget = npu_kv_budget(
            geometry.profile,
            cache.gpu_memory_utilization,
            weight_bytes + adapter_bytes,
            len(geometry.table.programs),
            num_devices=1,
        )
    else:
        budget = int(memory.total * cache.gpu_memory_utilization) - memory.used_by_us
        budget -= adapter_bytes
    most = memory.available - HEADROOM_BYTES - offload_memory_bytes(vllm_config) - adapter_bytes
    return max(0, min(budget, most, _useful(geometry, layers)))


def check_pool(
    vllm_config: "VllmConfig", geometry: Geometry, layers: tuple[KVLayer, ...], budget: int
) -> None:
    """Refuse a pool of ``budget`` bytes (or of the blocks the user set) that cannot serve.

    Raises ValueError when it cannot hold one sequence of the maximum length, with the length that
    fits, or when the device has no ids for its blocks. Layers with a sliding window need fewer
    blocks; vLLM's own check, which comes next, counts those.
    """
    blocks = vllm_config.cache_config.num_gpu_blocks_override
    if blocks is None:
        blocks = budget // block_bytes(layers, geometry.block_size)
    geometry.profile.check_num_blocks(blocks)
    if not any(layer.window for layer in layers):
        check_fits(geometry.max_model_len, max(1, blocks), geometry.block_size)


def _explicit(asked: int, memory: HostMemory) -> int:
    if asked > memory.available:
        raise ValueError(
            f"the KV cache was asked to take {asked / GIB:.2f} GiB, but only "
            f"{memory.available / GIB:.2f} of {memory.total / GIB:.2f} GiB are free: lower "
            "VLLM_CPU_KVCACHE_SPACE or --kv-cache-memory-bytes"
        )
    return asked


def _useful(geometry: Geometry, layers: tuple[KVLayer, ...]) -> int:
    """Twice what all sequences can fill at once: the rest of the machine stays the user's.

    The second half keeps the prefixes of finished requests. At most what the device has ids for.
    """
    blocks = blocks_for(2 * geometry.max_num_seqs * geometry.max_model_len, geometry.block_size)
    return geometry.profile.cap_num_blocks(blocks) * block_bytes(layers, geometry.block_size)
