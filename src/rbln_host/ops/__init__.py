# SPDX-License-Identifier: Apache-2.0
"""The ``rbln::`` operator set: schema and eager reference, one file per family."""

from rbln_host.ops.activation import ACTIVATIONS, gated_activation
from rbln_host.ops.attention import PADDING_POSITION, encoder_attention, paged_attention
from rbln_host.ops.elementwise import elementwise
from rbln_host.ops.kv_cache import PADDING_SLOT, write_kv
from rbln_host.ops.linear import gated_linear, linear
from rbln_host.ops.lora import NO_ADAPTER, lora_gated_linear, lora_linear, lora_shrink
from rbln_host.ops.moe import combine_experts, gated_experts, gated_product, route
from rbln_host.ops.norm import fused_add_rms_norm, layer_norm, rms_norm
from rbln_host.ops.rotary import rotary_embedding, rotary_write_kv
from rbln_host.ops.sampling import PADDING_ROW, mask_tokens, sample

__all__ = [
    "ACTIVATIONS",
    "NO_ADAPTER",
    "PADDING_POSITION",
    "PADDING_ROW",
    "PADDING_SLOT",
    "combine_experts",
    "elementwise",
    "encoder_attention",
    "fused_add_rms_norm",
    "gated_activation",
    "gated_experts",
    "gated_linear",
    "gated_product",
    "layer_norm",
    "linear",
    "lora_gated_linear",
    "lora_linear",
    "lora_shrink",
    "mask_tokens",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_write_kv",
    "route",
    "sample",
    "write_kv",
]
