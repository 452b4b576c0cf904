# SPDX-License-Identifier: Apache-2.0
"""The attention layers that vLLM looks for, where a model is programs."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from rbln_vllm.models.attention import PagedAttentionBackend
from rbln_vllm.models.kv_layers import KVLayer


class KVLayerStandIn(AttentionLayerBase):
    """Stands where vLLM expects the attention layer, which lives inside programs."""

    def __init__(self, layer: KVLayer) -> None:
        self.layer = layer
        self.num_heads = layer.num_heads
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.layer.spec(vllm_config.cache_config.block_size)
