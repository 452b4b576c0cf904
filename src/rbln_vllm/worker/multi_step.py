# SPDX-License-Identifier: Apache-2.0
"""The further decode steps of a turn: each one's token is the next one's input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rbln_vllm.core.multi_step import UNKNOWN_TOKEN
from rbln_vllm.worker.inputs import Integers, StepInputs, slots_of


class StopTokens:
    """The tokens after which a request has ended, of each row."""

    def __init__(self, request_ids: Sequence[str], requests: Mapping[str, Any]) -> None:
        self._request_ids = request_ids
        params_B = [requests[request].sampling_params for request in request_ids]
        self._stops_B = [{p.eos_token_id, *(p.stop_token_ids or ())} for p in params_B]
        self.ended: set[str] = set()

    def all_ended(self, token_B: Integers) -> bool:
        """Whether every row has by now drawn a token that ends it."""
        for request, token, stops in zip(
            self._request_ids, token_B.tolist(), self._stops_B, strict=True
        ):
            if token in stops:
                self.ended.add(request)
        return len(self.ended) == len(self._request_ids)


@dataclass(frozen=True)
class Turn:
    """``steps`` decode steps, the first of which was ``first``; blocks hold ``block_size``."""

    steps: int
    first: StepInputs
    block_size: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.first.num_tokens != self.first.num_sequences:
            raise ValueError("a turn has decode steps of one token a row")

    def tokens(
        self,
        first_B: Integers,
        next_tokens: Callable[[StepInputs, int], Integers],
        stops: StopTokens,
    ) -> Tensor:
        """Tokens int32 ``[B, steps]``; the first step drew ``first_B``.

        ``next_tokens`` computes one step and draws, given how many of the turn came before it.
        What no row needs any more is UNKNOWN_TOKEN.
        """
        step = self.first
        tokens_BS = np.full((len(first_B), self.steps), UNKNOWN_TOKEN, dtype=np.int32)
        tokens_BS[:, 0] = first_B
        for done in range(1, self.steps):
            if stops.all_ended(tokens_BS[:, done - 1]):
                return torch.from_numpy(tokens_BS)
            step = after(step, tokens_BS[:, done - 1], self.block_size)
            tokens_BS[:, done] = next_tokens(step, done)
        stops.all_ended(tokens_BS[:, -1])
        return torch.from_numpy(tokens_BS)


def after(step: StepInputs, token_B: Integers, block_size: int) -> StepInputs:
    """The step that follows ``step``, of one token a row, whose rows drew ``token_B``."""
    positions_B = step.positions_N + 1
    rows_B = np.arange(len(token_B))
    slots_B = slots_of(step.block_table_BT, rows_B, positions_B, block_size)
    return replace(step, input_ids_N=token_B, positions_N=positions_B, slots_N=slots_B, embeds=None)
