# SPDX-License-Identifier: Apache-2.0
"""What LMCache calls a GPU connector: moves chunks between its memory and the KV pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from torch import Tensor

from rbln_vllm.distributed.kv_transfer.lmcache.pool_copy import load_chunk, runs_of, save_chunk


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of a chunk that do not depend on its tokens."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, metadata: LMCacheMetadata) -> "ChunkShape":
        num_layers, _, _, num_kv_heads, head_size = metadata.kv_shape
        return cls(num_layers, num_kv_heads, head_size, metadata.kv_dtype)

    def view(self, memory_2LTE: Tensor) -> Tensor:
        """LMCache's memory for a chunk as ``[layers, num_kv_heads, tokens, 2 * head_size]``."""
        return memory_2LTE.view(self.num_layers, self.num_kv_heads, -1, 2 * self.head_size)

    def check_pool(self, layers: Mapping[str, Tensor]) -> None:
        """ValueError when the pool is not what chunks are made for."""
        if len(layers) != self.num_layers:
            raise ValueError(
                f"the KV pool has {len(layers)} layers, LMCache expects {self.num_layers}: models "
                "that share KV between layers are not supported with LMCache yet"
            )
        for name, layer in layers.items():
            found = (layer.shape[1], layer.shape[3], layer.dtype)
            if found != (self.num_kv_heads, 2 * self.head_size, self.dtype):
                raise ValueError(
                    f"layer {name} has KV of {list(layer.shape)} {layer.dtype}, LMCache expects "
                    f"{self.num_kv_heads} heads of {self.head_size} in {self.dtype}: models with "
                    "unequal layers are not supported with LMCache yet"
                )


class PoolTransfer(GPUConnectorInterface):
    """Copies chunks from and to the pool's layers, at once and in the calling thread.

    LMCache passes ``kvcaches`` (the layers), ``slot_mapping`` (int64, one slot a token of the
    request) and, when loading, ``vllm_cached_tokens``: the tokens that the pool has already and
    that other requests may be reading.
    """

    def __init__(self, shape: ChunkShape) -> None:
        self.shape = shape

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        layers, slots_T = kwargs["kvcaches"], kwargs["slot_mapping"]
        runs = runs_of(slots_T[start:end].tolist(), layers[0].shape[2])
        save_chunk(self.shape.view(memory_obj.tensor), layers, runs)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        layers, slots_T = kwargs["kvcaches"], kwargs["slot_mapping"]
        first = min(max(start, kwargs.get("vllm_cached_tokens", 0)), end)
        runs = runs_of(slots_T[first:end].tolist(), layers[0].shape[2])
        chunk_LHTE = self.shape.view(memory_obj.tensor)
        load_chunk(chunk_LHTE[:, :, first - start :], layers, runs)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """What LMCache allocates for a chunk, in its words: ``[2, layers, tokens, hidden]``."""
        hidden = self.shape.num_kv_heads * self.shape.head_size
        return torch.Size([2, self.shape.num_layers, num_tokens, hidden])
