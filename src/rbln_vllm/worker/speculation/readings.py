# SPDX-License-Identifier: Apache-2.0
"""What each kind of drafter reads of a step that has been verified."""

from typing import Protocol

import numpy as np
from torch import Tensor

from rbln_vllm.worker.speculation.draft_inputs import DraftRow
from rbln_vllm.worker.speculation.drafters import DraftStep


class Reading(Protocol):
    """Which tokens a drafter reads of a step, and beside which states of the target's."""

    def row(self, step: DraftStep, row: int) -> DraftRow:
        """What is new to the drafter in a row, in order; never more than a chunk."""
        ...

    def states(self, step: DraftStep) -> Tensor | None:
        """``[N, W]`` of the step's tokens, if any are read."""
        ...


class TokenReading:
    """A draft model reads every token at its own position.

    That is the step's first token once more: it is new to the drafter where the rest of a prompt
    was found in the prefix cache.
    """

    def row(self, step: DraftStep, row: int) -> DraftRow:
        start = int(step.first_positions[row])
        count = int(step.kept_counts[row]) + bool(step.sampled_B[row])
        tokens_n = step.tokens_BL[row, start : start + count]
        blocks_T = step.inputs.block_table_BT[row]
        return DraftRow(tokens_n, start, np.zeros(count, np.int64), blocks_T)

    def states(self, step: DraftStep) -> Tensor | None:
        return None


class StateReading:
    """EAGLE and MTP read the target's state of a token together with the token that follows it, at
    the position of the first.

    ``inner`` where the states are those of layers inside the target.
    """

    def __init__(self, *, inner: bool) -> None:
        self._inner = inner

    def row(self, step: DraftStep, row: int) -> DraftRow:
        start, count = int(step.first_positions[row]), int(step.kept_counts[row])
        tokens_n = step.tokens_BL[row, start + 1 : start + 1 + count]
        offset = int(step.row_offsets[row])
        blocks_T = step.inputs.block_table_BT[row]
        return DraftRow(tokens_n, start, np.arange(offset, offset + count), blocks_T)

    def states(self, step: DraftStep) -> Tensor | None:
        states_NW = step.aux_NH if self._inner else step.hidden_NH
        if states_NW is None:
            raise ValueError("the drafter reads states that the target's programs do not return")
        return states_NW
