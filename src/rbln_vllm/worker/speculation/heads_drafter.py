# SPDX-License-Identifier: Apache-2.0
"""Medusa: one program from the target's last state of each row to all drafts."""

import numpy as np
import torch
from torch import Tensor

from rbln_vllm.programs import ProgramKey, ProgramTable
from rbln_vllm.worker.inputs import Integers
from rbln_vllm.worker.program_store import ProgramStore
from rbln_vllm.worker.speculation.draft_inputs import TARGET
from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter
from rbln_vllm.worker.speculation.program_drafter import DraftLimits


class HeadsDrafter(HostDrafter):
    """Keeps nothing of a sequence."""

    def __init__(self, limits: DraftLimits, table: ProgramTable, store: ProgramStore) -> None:
        self.num_speculative_tokens = limits.num_drafts
        self._limits, self._table, self._store = limits, table, store
        self._states: dict[ProgramKey, Tensor] = {}

    def propose(self, step: DraftStep) -> list[list[int]]:
        """K drafts for each row with a new token; none near the end of the context.

        Raises MissingProgramError when a program may not be compiled now.
        """
        drafts_B: list[list[int]] = [[] for _ in range(step.num_rows)]
        fits_B = step.lengths_B <= self._limits.last_read
        rows = [row for row, new in enumerate(step.sampled_B) if new and fits_B[row]]
        if rows:
            last_B = step.row_offsets + step.kept_counts - 1
            drafts_RK = self._draft(step, np.asarray(last_B[rows], np.int64))
            for row, draft_K in zip(rows, drafts_RK.tolist(), strict=True):
                drafts_B[row] = draft_K
        return drafts_B

    def _draft(self, step: DraftStep, last_R: Integers) -> Tensor:
        assert step.hidden_NH is not None
        key = self._table.draft_for(len(last_R))
        self._store.ensure(key)
        if key not in self._states:
            self._states[key] = step.hidden_NH.new_zeros(key.batch, step.hidden_NH.shape[1])
        chosen_B = np.zeros(key.batch, np.int64)
        chosen_B[: len(last_R)] = last_R
        states_BW = self._states[key]
        torch.index_select(step.hidden_NH, 0, torch.from_numpy(chosen_B), out=states_BW)
        (drafts_BK,) = self._store.executable.run(key.name, {TARGET: states_BW})
        return drafts_BK[: len(last_R)]
