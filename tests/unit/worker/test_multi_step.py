# SPDX-License-Identifier: Apache-2.0
"""The steps of a turn: each takes the token of the one before, at the place that follows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rbln_vllm.core.multi_step import UNKNOWN_TOKEN
from rbln_vllm.worker.inputs import Integers, StepInputs
from rbln_vllm.worker.multi_step import StopTokens, Turn, after

BLOCK = 4
EOS, STOP = 2, 9


def first_step(positions: list[int]) -> StepInputs:
    """Rows with blocks 10, 11, 12 and 20, 21, 22 and so on."""
    rows = len(positions)
    table_BT = np.array([[10 * (row + 1) + i for i in range(3)] for row in range(rows)])
    positions_B = np.array(positions)
    slots_B = table_BT[np.arange(rows), positions_B // BLOCK] * BLOCK + positions_B % BLOCK
    ids_B = np.full(rows, 7)
    return StepInputs(ids_B, positions_B, slots_B, np.ones(rows, dtype=np.int64), table_BT)


def stops(rows: int, **params: Any) -> StopTokens:
    sampling = SimpleNamespace(**{"eos_token_id": EOS, "stop_token_ids": [STOP], **params})
    requests = {f"r{row}": SimpleNamespace(sampling_params=sampling) for row in range(rows)}
    return StopTokens(list(requests), requests)


def test_the_step_after() -> None:
    step = after(first_step([2, 3]), np.array([50, 51]), BLOCK)
    assert step.input_ids_N.tolist() == [50, 51]
    assert step.positions_N.tolist() == [3, 4]
    assert step.slots_N.tolist() == [10 * BLOCK + 3, 21 * BLOCK + 0]
    assert step.counts_B.tolist() == [1, 1]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_tokens_feed_the_next_step(steps: int) -> None:
    seen: list[tuple[list[int], int]] = []

    def next_tokens(step: StepInputs, done: int) -> Integers:
        seen.append((step.positions_N.tolist(), done))
        return step.input_ids_N + 10

    tokens_BS = Turn(steps, first_step([0, 5]), BLOCK).tokens(
        np.array([30, 60]), next_tokens, stops(2)
    )
    assert tokens_BS.tolist() == [[30 + 10 * i for i in range(steps)] for _ in range(1)] + [
        [60 + 10 * i for i in range(steps)]
    ]
    assert seen == [([0 + i, 5 + i], i) for i in range(1, steps)]


@pytest.mark.parametrize("ends", [EOS, STOP])
def test_a_turn_ends_when_every_row_has(ends: int) -> None:
    """One row ends first and goes on meanwhile; what it draws then is the scheduler's to drop."""
    drawn = iter([[ends, 8], [5, 8], [5, ends], [5, 5]])
    given = stops(2)
    tokens_BS = Turn(6, first_step([0, 0]), BLOCK).tokens(
        np.array([8, 8]), lambda _step, _done: np.array(next(drawn)), given
    )
    unknown = [UNKNOWN_TOKEN] * 2
    assert tokens_BS.tolist() == [[8, ends, 5, 5, *unknown], [8, 8, 8, ends, *unknown]]
    assert given.ended == {"r0", "r1"}


def test_an_end_in_the_last_step_is_known() -> None:
    given = stops(1)
    Turn(2, first_step([0]), BLOCK).tokens(np.array([8]), lambda *_: np.array([EOS]), given)
    assert given.ended == {"r0"}


def test_no_stop_tokens() -> None:
    given = stops(1, eos_token_id=None, stop_token_ids=None)
    assert not given.all_ended(np.array([EOS]))


def test_only_decode_steps() -> None:
    step = StepInputs(
        np.array([1, 2]), np.array([0, 1]), np.array([4, 5]), np.array([2]), np.array([[1]])
    )
    with pytest.raises(ValueError, match="one token a row"):
        Turn(2, step, BLOCK)
