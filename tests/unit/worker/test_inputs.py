# SPDX-License-Identifier: Apache-2.0
"""Staging pads every step to its program's shape, whatever the buffers held before."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import PADDING_POSITION, PADDING_SLOT
from rbln_vllm.worker.inputs import PADDING_BLOCK, StagedInputs, StepInputs, step_inputs

CHUNK, WIDTH = 8, 4
PREFILL = ProgramKey(Role.PREFILL, 1, CHUNK)
POISON = 10**9


def step(tokens: int, rows: int, width: int = WIDTH) -> StepInputs:
    blocks_BT = np.arange(1, 1 + rows * width, dtype=np.int32).reshape(rows, width)
    tokens_N = np.arange(tokens)
    counts_B = np.diff(np.linspace(0, tokens, rows + 1).astype(int))
    return StepInputs(7 + tokens_N, tokens_N, 100 + tokens_N, counts_B, blocks_BT)


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


def rows_of(*counts: int) -> StepInputs:
    """Tokens 10, 11, ... at positions 20, ... in slots 100, ..., of rows of these lengths."""
    tokens_N = np.arange(sum(counts))
    blocks_BT = np.ones((len(counts), WIDTH), dtype=np.int32)
    return StepInputs(10 + tokens_N, 20 + tokens_N, 100 + tokens_N, np.array(counts), blocks_BT)


DRAFTED = ProgramKey(Role.DECODE, 4, 3)
"""Rows of up to two drafts."""


@pytest.mark.parametrize(
    "counts",
    [(1,), (2,), (3,), (1, 1, 1, 1), (3, 3), (3, 3, 3, 3), (2, 3, 1), (1, 3), (3, 1, 2, 3), ()],
)
def test_rows_of_unequal_length_are_each_padded_after_poison(counts: tuple[int, ...]) -> None:
    staged = poisoned(DRAFTED)
    inputs = staged.stage(rows_of(*counts))
    token = 0
    for row in range(4):
        length = counts[row] if row < len(counts) else 0
        at = slice(3 * row, 3 * row + 3)
        new, pad = list(range(token, token + length)), 3 - length
        assert inputs["input_ids"][at].tolist() == [10 + n for n in new] + [0] * pad
        assert inputs["positions"][at].tolist() == [20 + n for n in new] + [0] * pad
        assert inputs["slots"][at].tolist() == [100 + n for n in new] + [PADDING_SLOT] * pad
        query_pos = inputs["query_pos"][at].tolist()
        assert query_pos == [20 + n for n in new] + [PADDING_POSITION] * pad
        token += length
    assert inputs["block_table"].tolist() == [[1] * WIDTH] * len(counts) + [
        [PADDING_BLOCK] * WIDTH
    ] * (4 - len(counts))


@pytest.mark.parametrize("counts", [(1,), (3, 3), (2, 3, 1), (1, 3), ()])
def test_rows_of_the_output_are_found_again(counts: tuple[int, ...]) -> None:
    step = rows_of(*counts)
    staged = StagedInputs(DRAFTED, WIDTH)
    ids = staged.stage(step)["input_ids"].numpy()
    assert ids[staged.rows_of(step)].tolist() == step.input_ids_N.tolist()


@pytest.mark.parametrize("counts", [(4,), (1, 4), (4, 2), (2, 4, 3, 3)])
def test_a_row_with_too_many_drafts_is_refused(counts: tuple[int, ...]) -> None:
    """Also where all tokens together would fill the program exactly."""
    with pytest.raises(ValueError, match="a row of 3 tokens cannot hold 4"):
        StagedInputs(DRAFTED, WIDTH).stage(rows_of(*counts))


def test_tokens_name_the_slots_of_their_adapters() -> None:
    staged = poisoned(PREFILL)
    adapted = replace(step(3, rows=1), adapters_N=np.array([2, 2, -1]))
    assert staged.stage(adapted)["lora_slots"].tolist() == [2, 2, *[-1] * (CHUNK - 2)]
    assert staged.stage(step(3, rows=1))["lora_slots"].tolist() == [-1] * CHUNK


def test_an_adapter_for_every_token_or_none() -> None:
    with pytest.raises(ValueError, match="an adapter for every token"):
        replace(step(3, rows=1), adapters_N=np.array([0]))


@pytest.mark.parametrize(("tokens", "rows"), [(CHUNK + 1, 1), (2, 2)])
def test_a_step_that_does_not_fit_is_refused(tokens: int, rows: int) -> None:
    with pytest.raises(ValueError, match="do not fit program prefill_b1_q8"):
        StagedInputs(PREFILL, WIDTH).stage(step(tokens, rows))


def test_a_token_needs_a_position_and_a_slot() -> None:
    with pytest.raises(ValueError, match="a position and a slot for every token"):
        StepInputs(np.arange(2), np.arange(2), np.arange(1), np.array([2]), np.ones((1, 1), int))


@pytest.mark.parametrize("counts", [[1], [3], [1, 1]])
def test_tokens_are_those_of_the_sequences(counts: list[int]) -> None:
    two = np.arange(2)
    with pytest.raises(ValueError, match=r"for every sequence|do not sum"):
        StepInputs(two, two, two, np.array(counts), np.ones((1, 1), int))


BLOCK = 4


def batch_of(computed: list[int], seed: int = 0, blocks: int = 6) -> Any:
    """A stand-in for vLLM's batch: random tokens, and distinct random blocks of each row."""
    random, rows = np.random.default_rng(seed), len(computed) + 2  # rows that are not in use
    table = 1 + random.permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
    return SimpleNamespace(
        num_computed_tokens_cpu=np.array([*computed, POISON, POISON], dtype=np.int32),
        req_prompt_embeds={},
        token_ids_cpu=random.integers(0, 1000, (rows, blocks * BLOCK), dtype=np.int32),
        block_table=[SimpleNamespace(block_size=BLOCK, get_numpy_array=lambda: table)],
    )


def expected_inputs(batch: Any, counts: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Token, position and slot of each token, one after another."""
    ids, positions, slots = [], [], []
    table = batch.block_table[0].get_numpy_array()
    for row, count in enumerate(counts):
        start = int(batch.num_computed_tokens_cpu[row])
        for position in range(start, start + count):
            ids.append(int(batch.token_ids_cpu[row, position]))
            positions.append(position)
            slots.append(int(table[row, position // BLOCK]) * BLOCK + position % BLOCK)
    return ids, positions, slots


@pytest.mark.parametrize(
    ("computed", "counts"),
    [
        ([0], [1]),
        ([0], [CHUNK]),
        ([BLOCK - 1], [BLOCK + 2]),
        ([BLOCK], [BLOCK]),
        ([0, BLOCK - 1, BLOCK, BLOCK + 1], [1, 1, 1, 1]),
        ([6 * BLOCK - 1], [1]),
        ([3, 0, 7], [3, 1, 5]),
        ([], []),
    ],
)
def test_a_step_is_read_from_the_batch(computed: list[int], counts: list[int]) -> None:
    batch = batch_of(computed)
    step = step_inputs(cast(Any, batch), np.array(counts, dtype=np.int32))
    got = (step.input_ids_N.tolist(), step.positions_N.tolist(), step.slots_N.tolist())
    assert got == expected_inputs(batch, counts)
    assert step.counts_B.tolist() == counts
    assert step.num_sequences == len(counts)


def test_every_token_of_a_sequence_has_its_adapter() -> None:
    counts, adapters_B = np.array([3, 1, 2], dtype=np.int32), np.array([1, -1, 0], dtype=np.int32)
    step = step_inputs(cast(Any, batch_of([3, 0, 7])), counts, adapters_B)
    assert step.adapters_N is not None
    assert step.adapters_N.tolist() == [1, 1, 1, -1, 0, 0]


def test_slots_of_a_large_pool_do_not_overflow() -> None:
    batch = batch_of([BLOCK])
    batch.block_table[0].get_numpy_array()[0, 1] = 2**30
    step = step_inputs(cast(Any, batch), np.array([1], dtype=np.int32))
    assert step.slots_N.tolist() == [2**30 * BLOCK]
