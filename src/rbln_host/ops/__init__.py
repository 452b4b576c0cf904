# SPDX-License-Identifier: Apache-2.0
"""The ``rbln::`` operator set: schema and eager reference, one file per family."""

from rbln_host.ops.attention import PADDING_POSITION, paged_attention
from rbln_host.ops.kv_cache import PADDING_SLOT, write_kv
from rbln_host.ops.norm import fused_add_rms_norm, rms_norm

__all__ = [
    "PADDING_POSITION",
    "PADDING_SLOT",
    "fused_add_rms_norm",
    "paged_attention",
    "rms_norm",
    "write_kv",
]
