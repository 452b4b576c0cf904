# SPDX-License-Identifier: Apache-2.0
"""The attention backend vLLM's own models see: it emits ``rbln::`` operators while captured.

The step's paged inputs reach the layers through vLLM's forward context, as they do for every
backend. After capture nothing here runs: programs contain the operators themselves.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)

HEAD_SIZES = (32, 64, 80, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class PagedInputs:
    """What paged attention needs of a step: ``B`` sequences of ``Q`` queries each.

    ``block_table_BT`` int32 block ids; ``slots_N`` int64 pool slots of the new tokens;
    ``query_pos_N`` int32 positions of the queries. Padding is -1 in the last two.
    """

    block_table_BT: Tensor
    slots_N: Tensor
    query_pos_N: Tensor


class PagedAttentionBackend(AttentionBackend):
    """Paged causal attention through ``rbln::write_kv`` and ``rbln::paged_attention``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PagedAttentionImpl"]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["PagedInputsBuilder"]:
        return PagedInputsBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class PagedAttentionImpl(AttentionImpl[PagedInputs]):
    """One layer's attention, as operators of the captured graph."""

    def __init__(  # noqa: PLR0917 (vLLM's signature)
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        _check_layer(head_size, attn_type, kv_sharing_target_layer_name)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes_H = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.window = sliding_window or 0
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.sinks_H = sinks

    def forward(  # noqa: PLR0917 (vLLM's signature)
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedInputs,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query``, ``key``, ``value`` are ``[N, heads, head_size]``; fills ``output`` (same)."""
        torch.ops.rbln.write_kv(key, value, kv_cache, attn_metadata.slots_N)
        attended_NHD = torch.ops.rbln.paged_attention(
            query,
            kv_cache,
            attn_metadata.block_table_BT,
            attn_metadata.query_pos_N,
            self.scale,
            self.window,
            self.soft_cap,
            self.sinks_H,
            self.alibi_slopes_H,
        )
        return output.copy_(attended_NHD)


def _check_layer(head_size: int, attn_type: str, kv_sharing_target: str | None) -> None:
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head size {head_size} is not supported; supported: {HEAD_SIZES}")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(
            f"{attn_type} attention is not built yet; only decoder self-attention is"
        )
    if kv_sharing_target is not None:
        raise NotImplementedError("layers that share another layer's KV cache are not supported")


class PagedInputsBuilder(AttentionMetadataBuilder[PagedInputs]):
    """Takes the step's block table and slots from vLLM's common metadata, unpadded."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedInputs:
        positions = common_attn_metadata.positions
        assert positions is not None
        return PagedInputs(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.slot_mapping,
            positions,
        )
