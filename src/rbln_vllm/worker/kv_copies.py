# SPDX-License-Identifier: Apache-2.0
"""Copies between KV blocks that the scheduler orders with a step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from vllm.v1.core.sched.output import SchedulerOutput

from rbln_vllm.core.kv_cache.copies import KVCopy


class CopiesKV(Protocol):
    """What keeps KV in the pool: an executable with its layers bound, a drafter."""

    def copy_kv(self, copies: Sequence[KVCopy]) -> None: ...


def carry_out_copies(pools: Sequence[CopiesKV], output: SchedulerOutput) -> SchedulerOutput:
    """Carry out the step's copies in each pool; returns the step without them, for upstream.

    Upstream knows copies of whole blocks only. ``output`` itself stays: the scheduler, which may
    live in the same process, looks at it again when the step has ended.
    """
    copies = cast(list[KVCopy] | None, output.kv_cache_block_copies)  # upstream's: whole blocks
    if not copies:
        return output
    for pool in pools:
        pool.copy_kv(copies)
    return replace(output, kv_cache_block_copies=None)
