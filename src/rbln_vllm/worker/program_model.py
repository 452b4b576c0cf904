# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runner takes for the model: its two calls run programs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.programs import ProgramKey
from rbln_vllm.worker.embed_programs import EmbedPrograms, Programs, embeds_spec
from rbln_vllm.worker.inputs import StagedInputs, StepInputs, index_of


@dataclass(frozen=True)
class StepOutputs:
    """``[n, hidden]`` of a step's ``n`` tokens, and what else the program says of each of them.

    ``aux_NH`` are auxiliary hidden states, concatenated, of a target that a drafter looks into.
    """

    hidden_NH: Tensor
    aux_NH: Tensor | None = None


class ProgramModel(torch.nn.Module):
    """Has no weights of its own; ``run_step`` and ``compute_logits`` choose and run programs.

    Both raise MissingProgramError when the program they need may not be compiled now.
    """

    def __init__(self, geometry: Geometry, store: Programs) -> None:
        super().__init__()
        self._table, self._store = geometry.table, store
        self._embeds = EmbedPrograms(geometry.table, store) if geometry.takes_embeds else None
        self._num_blocks_per_seq = geometry.num_blocks_per_seq
        self._staged: dict[ProgramKey, StagedInputs] = {}
        self._rows: dict[ProgramKey, Tensor] = {}
        self._greedy_R = torch.empty(0, dtype=torch.int64)
        self._unread = False
        self._blank: dict[ProgramKey, tuple[Tensor, Tensor]] = {}
        self.launched: Callable[[], None] = _nothing
        """Called when a step's program is about to start and the interpreter will be free."""

    def run_step(self, key: ProgramKey, step: StepInputs) -> StepOutputs:
        """What the forward program gives for the step's tokens, without padding.

        It is the program's own buffer, valid until its next run, unless rows of unequal length
        had to be taken out of it.
        """
        self._store.ensure(key)
        if key not in self._staged:
            spec = None
            if self._embeds is not None:
                spec = embeds_spec(self._store.executable, key)
            self._staged[key] = StagedInputs(key, self._num_blocks_per_seq, spec)
        staged = self._staged[key]
        inputs, places = staged.stage(step), staged.rows_of(step)
        if self._embeds is not None:
            staged.stage_embeds(step, self._embeds.of(step))
        last = places.stop if isinstance(places, slice) else int(places[-1]) + 1
        self.launched()
        outputs = self._store.executable.run(key.name, inputs, last)
        return StepOutputs(*(output[index_of(places)] for output in outputs))

    def begin_step(self, *, draws: bool) -> None:
        """Whether a token is drawn in the step; else its logits, which nobody reads, are zeros."""
        self._unread = not draws

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits ``[R, vocabulary]`` of any number of rows; many rows take several runs.

        Of one run they are the program's own buffer, valid until its next run.
        """
        key = self._table.logits_for(hidden_RH.shape[0])
        unread, self._unread = self._unread, False
        if unread and hidden_RH.shape[0] == 1 and key in self._blank:
            logits_RV, self._greedy_R = (tensor.zero_() for tensor in self._blank[key])
            return logits_RV
        if hidden_RH.shape[0] <= key.batch:
            logits_RV, self._greedy_R = self._logits(key, hidden_RH)
            return logits_RV
        # Each part is copied before the next run overwrites it.
        parts = [
            [tensor.clone() for tensor in self._logits(key, part)]
            for part in hidden_RH.split(key.batch)
        ]
        logits_RV, self._greedy_R = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return logits_RV

    @property
    def greedy_tokens(self) -> Tensor:
        """The first largest of each row of the last logits, int64 ``[R]``."""
        return self._greedy_R

    def _logits(self, key: ProgramKey, rows_BH: Tensor) -> tuple[Tensor, Tensor]:
        self._store.ensure(key)
        rows = rows_BH.shape[0]
        if key not in self._rows:
            self._rows[key] = rows_BH.new_zeros(key.batch, rows_BH.shape[1])
        padded_BH = self._rows[key]
        padded_BH[:rows] = rows_BH
        if rows < key.batch:
            padded_BH[rows:] = 0
        logits_BV, greedy_B = self._store.executable.run(key.name, {"hidden": padded_BH}, rows)
        if rows == 1 and key not in self._blank:
            self._blank[key] = torch.zeros_like(logits_BV[:1]), torch.zeros_like(greedy_B[:1])
        return logits_BV[:rows], greedy_B[:rows]


def _nothing() -> None:
    return None
