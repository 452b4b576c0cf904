# SPDX-License-Identifier: Apache-2.0
"""Copies between KV blocks that the scheduler orders with a step."""

from dataclasses import replace
from typing import Protocol, cast

from vllm.v1.core.sched.output import SchedulerOutput

from rbln_vllm.core.kv_cache.copies import KVCopy


class CopiesKV(Protocol):
    """An executable with its pool bound."""

    def copy_kv(self, copies: list[KVCopy]) -> None: ...


def carry_out_copies(executable: CopiesKV, output: SchedulerOutput) -> SchedulerOutput:
    """Carry out the step's copies; returns the step without them, for upstream's runner.

    Upstream knows copies of whole blocks only. ``output`` itself stays: the scheduler, which may
    live in the same process, looks at it again when the step has ended.
    """
    copies = cast(list[KVCopy] | None, output.kv_cache_block_copies)  # upstream's: whole blocks
    if not copies:
        return output
    executable.copy_kv(copies)
    return replace(output, kv_cache_block_copies=None)
