# SPDX-License-Identifier: Apache-2.0
"""Staging pads every step to its program's shape, whatever the buffers held before."""

import pytest
import torch

from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import PADDING_POSITION, PADDING_SLOT
from rbln_vllm.worker.inputs import PADDING_BLOCK, StagedInputs, StepInputs

CHUNK, WIDTH = 8, 4
PREFILL = ProgramKey(Role.PREFILL, 1, CHUNK)
POISON = 10**9


def step(tokens: int, rows: int, width: int = WIDTH) -> StepInputs:
    paged = PagedInputs(
        torch.arange(1, 1 + rows * width, dtype=torch.int32).reshape(rows, width),
        torch.arange(100, 100 + tokens),
        torch.arange(tokens, dtype=torch.int32),
    )
    ids = torch.arange(7, 7 + tokens, dtype=torch.int32)
    return StepInputs(ids, torch.arange(tokens), paged)


def poisoned(key: ProgramKey) -> StagedInputs:
    staged = StagedInputs(key, WIDTH)
    for buffer in staged.tensors.values():
        buffer.fill_(POISON)
    return staged


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK])
def test_prefill_padding_is_neutral_after_poison(tokens: int) -> None:
    inputs = poisoned(PREFILL).stage(step(tokens, rows=1))
    assert inputs["input_ids"].tolist() == [*range(7, 7 + tokens), *[0] * (CHUNK - tokens)]
    assert inputs["slots"][tokens:].eq(PADDING_SLOT).all()
    assert inputs["query_pos"][tokens:].eq(PADDING_POSITION).all()
    assert inputs["positions"][tokens:].eq(0).all()
    assert inputs["slots"][:tokens].tolist() == list(range(100, 100 + tokens))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_decode_padding_rows_name_the_padding_block(rows: int) -> None:
    inputs = poisoned(ProgramKey(Role.DECODE, 4)).stage(step(rows, rows))
    assert inputs["block_table"].shape == (4, WIDTH)
    assert inputs["block_table"][rows:].eq(PADDING_BLOCK).all()
    assert not inputs["block_table"][:rows].eq(POISON).any()


def test_nothing_but_padding_can_be_staged() -> None:
    inputs = poisoned(PREFILL).stage(step(0, rows=0))
    assert inputs["slots"].eq(PADDING_SLOT).all()
    assert inputs["block_table"].eq(PADDING_BLOCK).all()


def test_a_wider_block_table_is_cut_to_the_program() -> None:
    inputs = poisoned(PREFILL).stage(step(1, rows=1, width=WIDTH + 3))
    assert inputs["block_table"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("tokens", "rows"), [(CHUNK + 1, 1), (2, 2)])
def test_a_step_that_does_not_fit_is_refused(tokens: int, rows: int) -> None:
    with pytest.raises(ValueError, match="do not fit program prefill_b1_q8"):
        StagedInputs(PREFILL, WIDTH).stage(step(tokens, rows))
