# SPDX-License-Identifier: Apache-2.0
"""The step's copies are carried out once, whatever else the step holds."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from rbln_vllm.core.kv_cache.copies import KVCopy
from rbln_vllm.worker.kv_copies import carry_out_copies

COPIES = [KVCopy(3, 5, 7), KVCopy(1, 2, 8)]


class Executable:
    """Notes what it is told to copy."""

    def __init__(self) -> None:
        self.calls: list[list[KVCopy]] = []

    def copy_kv(self, copies: Sequence[KVCopy]) -> None:
        self.calls.append(list(copies))


def step(copies: Any, tokens: dict[str, int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.kv_cache_block_copies = tokens, copies
    return output


@pytest.mark.parametrize("tokens", [{}, {"a": 3}], ids=["no tokens", "tokens"])
def test_all_in_one_call_and_not_upstream_again(tokens: dict[str, int]) -> None:
    executable, output = Executable(), step(COPIES, tokens)
    rest = carry_out_copies([executable], output)
    assert executable.calls == [COPIES]
    assert rest.kv_cache_block_copies is None
    kept = [field.name for field in fields(output) if field.name != "kv_cache_block_copies"]
    assert all(getattr(rest, name) is getattr(output, name) for name in kept)
    assert output.kv_cache_block_copies == COPIES, "the scheduler's own step was changed"


@pytest.mark.parametrize("copies", [None, []])
def test_most_steps_have_none(copies: Any) -> None:
    executable, output = Executable(), step(copies, {"a": 1})
    assert carry_out_copies([executable], output) is output
    assert not executable.calls
