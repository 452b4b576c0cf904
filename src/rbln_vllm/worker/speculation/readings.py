# SPDX-License-Identifier: Apache-2.0
"""What each kind of drafter reads of a step that has been verified."""

from typing import Protocol

import numpy as np
from torch import Tensor

from rbln_vllm.worker.speculation.draft_inputs import DraftRow
from rbln_vllm.worker.speculation.drafters import DraftStep


class Reading(Protocol):
    """Which tokens a drafter reads of a step, and beside which states of the target's."""

    def rows(self, step: DraftStep) -> list[DraftRow]:
        """What is new to the drafter in each row, in order; never more than a chunk and a token."""
        ...

    def states(self, step: DraftStep) -> Tensor | None:
        """``[N, W]`` of the step's tokens, if any are read."""
        ...


class TokenReading:
    """A draft model reads every token at its own position.

    That is the step's first token once more: it is new to the drafter where the rest of a prompt
    was found in the prefix cache.
    """

    def rows(self, step: DraftStep) -> list[DraftRow]:
        new_B = np.array([bool(new) for new in step.sampled_B], np.int64)
        ends_B = step.first_positions + step.kept_counts + new_B
        none_n = np.zeros(int(np.max(ends_B - step.first_positions)), np.int64)
        return [
            DraftRow(tokens_L[start:end], int(start), none_n[: end - start], blocks_T)
            for tokens_L, start, end, blocks_T in zip(
                step.tokens_BL,
                step.first_positions,
                ends_B,
                step.inputs.block_table_BT,
                strict=True,
            )
        ]

    def states(self, step: DraftStep) -> Tensor | None:
        return None


class StateReading:
    """EAGLE and MTP read the target's state of a token together with the token that follows it, at
    the position of the first.

    ``inner`` where the states are those of layers inside the target.
    """

    def __init__(self, *, inner: bool) -> None:
        self._inner = inner

    def rows(self, step: DraftStep) -> list[DraftRow]:
        return [
            DraftRow(
                tokens_L[start + 1 : start + 1 + count],
                int(start),
                np.arange(offset, offset + count),
                blocks_T,
            )
            for tokens_L, start, count, offset, blocks_T in zip(
                step.tokens_BL,
                step.first_positions,
                step.kept_counts,
                step.row_offsets,
                step.inputs.block_table_BT,
                strict=True,
            )
        ]

    def states(self, step: DraftStep) -> Tensor | None:
        states_NW = step.aux_NH if self._inner else step.hidden_NH
        if states_NW is None:
            raise ValueError("the drafter reads states that the target's programs do not return")
        return states_NW
