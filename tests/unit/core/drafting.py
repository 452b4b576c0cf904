# SPDX-License-Identifier: Apache-2.0
"""The harness with drafts: a runner that verifies them, and one that makes up good and bad ones."""

import random
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from rbln_vllm.core.scheduler import RBLNScheduler
from rbln_vllm.core.step import StepKind, StepPlan
from tests.unit.core.fake_runner import VOCAB, FakeRunner, sample
from tests.unit.core.harness import Driver


class DraftingRunner(FakeRunner):
    """Writes the KV of drafts too, keeps those that are what it samples, and guesses on.

    A rejected draft's KV stays in the simulated memory: whoever reads it fails.
    """

    def __init__(self, chunk: int, block: int, drafts: int, rng: random.Random) -> None:
        super().__init__(chunk, block)
        self.drafts, self.rng = drafts, rng
        self.scheduled: dict[str, list[int]] = {}
        self.guesses: dict[str, list[int]] = {}
        self.accepted = self.rejected = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.scheduled = output.scheduled_spec_decode_tokens
        result = super().execute(output)
        self.guesses = {
            name: self._guess(self.rows[name].tokens) if new else []
            for name, new in zip(result.req_ids, result.sampled_token_ids, strict=True)
        }
        return result

    def _run(self, req_id: str, start: int, count: int) -> list[int]:
        drafts, row = self.scheduled.get(req_id, []), self.rows[req_id]
        assert all(0 <= draft < VOCAB for draft in drafts), "a draft that is no token"
        assert len(drafts) <= self.drafts
        first = super()._run(req_id, start, count - len(drafts))
        assert first or not drafts, "drafts after an unfinished prompt"
        if not drafts:
            return first
        for offset, draft in enumerate(drafts):
            self.kv[self._slot(row, start + 1 + offset)] = draft
        new = first
        while len(new) <= len(drafts) and new[-1] == drafts[len(new) - 1]:
            row.tokens.append(sample(row.tokens))
            new.append(row.tokens[-1])
        self.accepted += len(new) - 1
        self.rejected += len(drafts) - len(new) + 1
        return new

    def _guess(self, tokens: Sequence[int]) -> list[int]:
        context = list(tokens)
        for _ in range(self.rng.randrange(self.drafts + 1)):
            right = self.rng.random() < 0.7
            context.append(sample(context) if right else self.rng.randrange(VOCAB))
        return context[len(tokens) :]


class DraftingDriver(Driver):
    """Hands drafts to the scheduler as the engine does, when a step's output has been applied."""

    def __init__(self, scheduler: RBLNScheduler, rng: random.Random, **options: Any) -> None:
        super().__init__(scheduler, **options)
        self._rng = rng
        self.runner: DraftingRunner = DraftingRunner(
            scheduler.chunk_size, scheduler.block_size, scheduler.num_spec_tokens, rng
        )

    def step(self, abort_in_flight: Sequence[str] = ()) -> StepPlan:
        plan = super().step(abort_in_flight)
        if plan.kind is not StepKind.EMPTY:
            guesses = self.runner.guesses
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(guesses), list(guesses.values()))
            )
        return plan
