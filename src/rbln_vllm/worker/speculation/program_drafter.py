# SPDX-License-Identifier: Apache-2.0
"""Drafters that are models: two programs, one that reads prompts and one that drafts K tokens.

The drafter's layers have their own part in every block of the pool, so its KV is found, copied,
evicted and preempted with the target's. What holds after each step: of every position that the
target has computed, the drafter's KV is there too (but for positions past ``limit``, where it
never drafts). So nothing is remembered of a request between steps.
"""

from dataclasses import dataclass

from torch import Tensor

from rbln_vllm.models.kv_layers import kv_input_name
from rbln_vllm.programs import ProgramKey, ProgramTable
from rbln_vllm.worker.inputs import Integers
from rbln_vllm.worker.program_store import ProgramStore
from rbln_vllm.worker.speculation.draft_inputs import DraftInputs, DraftRow
from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter
from rbln_vllm.worker.speculation.readings import Reading


@dataclass(frozen=True)
class DraftLimits:
    """``num_drafts`` K; ``max_len`` of the drafter, in tokens, at most the target's."""

    num_drafts: int
    max_len: int

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or self.max_len < 1:
            raise ValueError(f"a drafter drafts a token or more: {self}")

    @property
    def last_read(self) -> int:
        """Beyond this many tokens a sequence gets no drafts, and no KV is needed."""
        return self.max_len - self.num_drafts


class ProgramDrafter(HostDrafter):
    """Runs the drafter's programs, which are in the target's store, as its KV is in its pool."""

    def __init__(
        self, reading: Reading, limits: DraftLimits, table: ProgramTable, store: ProgramStore
    ) -> None:
        self.num_speculative_tokens = limits.num_drafts
        self._reading, self._limits, self._table, self._store = reading, limits, table, store
        self._inputs: dict[ProgramKey, DraftInputs] = {}

    def warm_up(self) -> None:
        """Run the drafter's programs once, on nothing but padding."""
        for key in self._table.drafts:
            if key.name in self._store.executable.program_names:
                self._store.executable.run(key.name, self._inputs_of(key).stage([], None))

    def propose(self, step: DraftStep) -> list[list[int]]:
        """K drafts for each row with a new token; none near the end of the drafter's context.

        Raises MissingProgramError when a program may not be compiled now.
        """
        states_NW = self._reading.states(step)
        drafts_B: list[list[int]] = [[] for _ in range(step.num_rows)]
        drafting: dict[int, DraftRow] = {}
        for row, unread in enumerate(self._reading.rows(step)):
            if step.sampled_B[row] and step.lengths_B[row] <= self._limits.last_read:
                drafting[row] = self._read_ahead(unread, states_NW)
            else:
                self._read(unread.until(self._limits.last_read), states_NW)
        if drafting:
            drafts_RK = self._draft(list(drafting.values()), states_NW)
            for row, draft_K in zip(drafting, drafts_RK.tolist(), strict=True):
                drafts_B[row] = draft_K
        return drafts_B

    def _read_ahead(self, unread: DraftRow, states_NW: Tensor | None) -> DraftRow:
        """Read what the first pass of drafting cannot hold; returns the rest."""
        if len(unread) <= self._table.drafts[-1].query:
            return unread
        first, last = unread.split(len(unread) - 1)
        self._read(first, states_NW)
        return last

    def _read(self, row: DraftRow, states_NW: Tensor | None) -> None:
        """Fill the drafter's KV of these tokens."""
        if len(row):
            key = self._table.draft_prefill
            self._store.ensure(key)
            inputs = self._inputs_of(key).stage([row], states_NW)
            self._store.executable.run(key.name, inputs, len(row))

    def _draft(self, rows: list[DraftRow], states_NW: Tensor | None) -> Integers:
        key = self._table.draft_for(len(rows))
        self._store.ensure(key)
        inputs = self._inputs_of(key).stage(rows, states_NW)
        (drafts_BK,) = self._store.executable.run(key.name, inputs)
        drafts: Integers = drafts_BK.numpy()[: len(rows)]
        return drafts

    def _inputs_of(self, key: ProgramKey) -> DraftInputs:
        if key not in self._inputs:
            specs = self._store.executable.load(key.name).graph.inputs
            own = {name: spec for name, spec in specs.items() if name not in self._pool}
            self._inputs[key] = DraftInputs(key, own, self._table.block_size)
        return self._inputs[key]

    @property
    def _pool(self) -> frozenset[str]:
        return frozenset(kv_input_name(index) for index in range(len(self._store.kv_layers)))
