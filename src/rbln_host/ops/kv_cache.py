# SPDX-License-Identifier: Apache-2.0
"""``rbln::write_kv``: store new keys and values in the paged KV pool.

The pool of one layer is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``: keys in the
first half of the last axis, values in the second. A *slot* is ``block_id * block_size + offset``.
"""

import torch
from torch import Tensor

from rbln_host.ops.library import define

PADDING_SLOT = -1
"""Rows with this slot are padding: nothing is read from them and nothing is written for them."""


@define(
    "write_kv(Tensor key_NHD, Tensor value_NHD, Tensor(a!) kv_cache, Tensor slots_N) -> ()",
    meta=lambda key_NHD, value_NHD, kv_cache, slots_N: None,
)
def write_kv(key_NHD: Tensor, value_NHD: Tensor, kv_cache: Tensor, slots_N: Tensor) -> None:
    """Write each row's key and value at its slot; rows whose slot is negative are skipped.

    Shapes: ``key_NHD``, ``value_NHD`` ``[N, num_kv_heads, head_size]``; ``slots_N`` ``[N]``
    integers; ``kv_cache`` as in the module's text. Raises IndexError for a slot outside the pool.
    """
    rows = torch.nonzero(slots_N >= 0).squeeze(1)
    slots = slots_N[rows].long()
    block_size = kv_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    pair_NHD2 = torch.cat((key_NHD[rows], value_NHD[rows]), dim=-1)
    kv_cache[blocks, :, offsets] = pair_NHD2.to(kv_cache.dtype)
