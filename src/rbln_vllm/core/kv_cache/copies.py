# SPDX-License-Identifier: Apache-2.0
"""The order to copy the head of one KV block into another, as the scheduler sends it.

``SchedulerOutput.kv_cache_block_copies`` is a list of these when sub-block prefix caching is
active. The runner carries them out in the order of the list, before the forward of the same
step, over every layer. The scheduler keeps a reference to both blocks until the output of that
step has come back, so neither is handed out meanwhile.
"""

from typing import NamedTuple


class KVCopy(NamedTuple):
    """Copy the first ``num_tokens`` slots of block ``src_block_id`` to ``dst_block_id``.

    Both are ids of the one KV pool. ``0 < num_tokens < block_size``; no block is both a source
    and a destination within one step, and a destination appears once.
    """

    src_block_id: int
    dst_block_id: int
    num_tokens: int
