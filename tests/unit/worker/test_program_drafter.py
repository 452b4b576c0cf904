# SPDX-License-Identifier: Apache-2.0
"""A drafter's programs draft what a plain loop over each sequence drafts, whatever came before."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rbln_vllm.programs import DrafterShape, ProgramTable
from rbln_vllm.worker.inputs import StepInputs, slots_of
from rbln_vllm.worker.speculation.drafters import DraftStep
from rbln_vllm.worker.speculation.program_drafter import DraftLimits, ProgramDrafter
from rbln_vllm.worker.speculation.readings import Reading, StateReading, TokenReading
from tests.unit.worker.toy_drafter import HIDDEN, VOCAB, PlainDrafter, ToyNetwork, ToyStore

BLOCK, CHUNK, WIDTH, K, BUCKETS = 4, 8, 12, 3, (1, 2, 4)
TARGET_LEN, DRAFTER_LEN = BLOCK * WIDTH, 44
STATES = torch.randn(97, HIDDEN, generator=torch.Generator().manual_seed(5))


def state_of(position: int, token: int) -> Tensor:
    """The target's hidden state, which depends on both."""
    return STATES[None, (position * 31 + token) % 97]


@dataclass
class Sequence:
    """One request as the target sees it: ``tokens`` are known, the first ``computed`` have KV."""

    name: str
    tokens: list[int]
    computed: int
    blocks: list[int]
    drafts: list[int] = field(default_factory=list)


@functools.cache
def drafter_of(reads_states: bool, num_drafts: int) -> tuple[ToyNetwork, ProgramTable, ToyStore]:
    """Compiled once for all tests; each has its own pool."""
    shape = DrafterShape(num_drafts + 1 + (not reads_states), keeps_kv=True)
    table = ProgramTable(CHUNK, BUCKETS, BLOCK, WIDTH, drafter=shape)
    network = ToyNetwork(reads_states=reads_states)
    return network, table, ToyStore(network, table, num_drafts)


class Traffic:
    """A target that computes chunks and decode rows, accepts some drafts and chooses tokens."""

    def __init__(self, reads_states: bool, seed: int, num_drafts: int = K) -> None:
        self.network, self.table, self.store = drafter_of(reads_states, num_drafts)
        self.num_drafts = num_drafts
        self.random, self.plain = random.Random(seed), PlainDrafter(self.network, state_of)
        self.free = list(range(1, 1 + 6 * WIDTH))
        self.random.shuffle(self.free)
        self.store.bind_pool(1 + 6 * WIDTH, BLOCK)
        reading: Reading = StateReading(inner=False) if reads_states else TokenReading()
        limits = DraftLimits(num_drafts, DRAFTER_LEN)
        self.drafter = ProgramDrafter(reading, limits, self.table, cast(Any, self.store))
        self.drafter.warm_up()

    def start(self, length: int, prefix_of: Sequence | None = None) -> Sequence:
        """A new request; it shares the whole blocks of another one's prefix, but for its end."""
        tokens = [self.random.randrange(VOCAB) for _ in range(length)]
        shared: list[int] = []
        if prefix_of is not None:
            common = min(length, prefix_of.computed)
            tokens[:common] = prefix_of.tokens[:common]
            shared = prefix_of.blocks[: (common - 1) // BLOCK]
        own = [self.free.pop() for _ in range(WIDTH - len(shared))]
        return Sequence(f"{len(self.free)}", tokens, len(shared) * BLOCK, shared + own)

    def prefill(self, sequence: Sequence) -> None:
        """The whole prompt, chunk by chunk; a last token alone is a decode row."""
        length = len(sequence.tokens)
        while sequence.computed < length:
            end = min(length, (sequence.computed // CHUNK + 1) * CHUNK)
            self.step({sequence.name: (sequence, end - sequence.computed)})

    def decode(self, sequences: list[Sequence]) -> None:
        self.step({s.name: (s, 1 + len(s.drafts)) for s in sequences})

    def step(self, rows: dict[str, tuple[Sequence, int]]) -> None:
        computed = [list(self._computed(s, count)) for s, count in rows.values()]
        starts = [s.computed for s, _ in rows.values()]
        sampled = [self._choose(s, count) for s, count in rows.values()]
        self._check(
            rows,
            sampled,
            self.drafter.propose(
                self._verified([s for s, _ in rows.values()], computed, starts, sampled)
            ),
        )

    def _computed(self, sequence: Sequence, count: int) -> list[int]:
        known = sequence.tokens[sequence.computed : sequence.computed + count]
        return known + sequence.drafts[: count - len(known)]

    def _choose(self, sequence: Sequence, count: int) -> list[int]:
        """Accept some drafts, then a token of the target's own, unless the prompt goes on."""
        if sequence.computed + count < len(sequence.tokens):
            sequence.computed += count
            return []
        accepted = self.random.randint(0, len(sequence.drafts))
        new = [*sequence.drafts[:accepted], self.random.randrange(VOCAB)]
        new = new[: TARGET_LEN - len(sequence.tokens)]
        sequence.computed = len(sequence.tokens) + len(new) - 1
        sequence.tokens += new
        return new

    def _verified(
        self,
        sequences: list[Sequence],
        computed: list[list[int]],
        starts: list[int],
        sampled: list[list[int]],
    ) -> DraftStep:
        counts_B = np.array([len(tokens) for tokens in computed])
        rows_N = np.repeat(np.arange(len(counts_B)), counts_B)
        ids_N = np.concatenate([np.array(tokens) for tokens in computed])
        positions_N = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(starts, counts_B, strict=True)]
        )
        blocks_BT = np.array([s.blocks for s in sequences], np.int32)
        slots_N = slots_of(blocks_BT, rows_N, positions_N, BLOCK)
        tokens_BL = np.zeros((len(sequences), TARGET_LEN), np.int32)
        for row, sequence in enumerate(sequences):
            tokens_BL[row, : len(sequence.tokens)] = sequence.tokens
        states = [state_of(p, t) for p, t in zip(positions_N.tolist(), ids_N.tolist(), strict=True)]
        return DraftStep(
            tuple(s.name for s in sequences),
            StepInputs(ids_N, positions_N, slots_N, counts_B, blocks_BT),
            sampled,
            tokens_BL,
            np.array([len(s.tokens) for s in sequences]),
            torch.cat(states),
        )

    def _check(
        self,
        rows: dict[str, tuple[Sequence, int]],
        sampled: list[list[int]],
        drafts: list[list[int]],
    ) -> None:
        for (sequence, _), new, got in zip(rows.values(), sampled, drafts, strict=True):
            fits = len(sequence.tokens) + self.num_drafts <= DRAFTER_LEN
            expected = self.plain.drafts(sequence.tokens, self.num_drafts) if new and fits else []
            assert got == expected, f"{sequence.name} of {len(sequence.tokens)} tokens"
            sequence.drafts = got

    def finish(self, sequence: Sequence, shared: int = 0) -> None:
        self.free += sequence.blocks[shared:]


both = pytest.mark.parametrize("reads_states", [False, True], ids=["tokens", "states"])


@both
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_prompts_of_every_edge_then_drafts(reads_states: bool, length: int) -> None:
    traffic = Traffic(reads_states, seed=length)
    sequence = traffic.start(length)
    traffic.prefill(sequence)
    for _ in range(3):
        traffic.decode([sequence])


@both
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_any_number_of_drafts(reads_states: bool, num_drafts: int) -> None:
    traffic = Traffic(reads_states, seed=num_drafts, num_drafts=num_drafts)
    sequence = traffic.start(CHUNK + 3)
    traffic.prefill(sequence)
    for _ in range(4):
        traffic.decode([sequence])


@both
def test_no_drafts_near_the_end_of_the_drafter_s_context(reads_states: bool) -> None:
    traffic = Traffic(reads_states, seed=1)
    longest = traffic.start(DRAFTER_LEN - K - 2)
    traffic.prefill(longest)
    while len(longest.tokens) < TARGET_LEN:
        traffic.decode([longest])
    assert not longest.drafts
    beyond = traffic.start(DRAFTER_LEN + 1)  # its prompt is longer than what the drafter reads
    traffic.prefill(beyond)
    after = traffic.start(DRAFTER_LEN - K - 1, prefix_of=beyond)
    traffic.prefill(after)
    assert after.drafts


@both
@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, 6 * BLOCK + 1])
def test_a_prefix_of_another_request_is_read_already(reads_states: bool, length: int) -> None:
    """Of 2 blocks + 1 only one token is left to compute, by a decode step."""
    traffic = Traffic(reads_states, seed=length)
    first = traffic.start(7 * BLOCK)
    traffic.prefill(first)
    second = traffic.start(length, prefix_of=first)
    assert second.computed == (length - 1) // BLOCK * BLOCK
    traffic.prefill(second)
    traffic.decode([second, first])
    traffic.decode([first, second])


@both
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(reads_states: bool, seed: int) -> None:
    traffic = Traffic(reads_states, seed)
    running: list[Sequence] = []
    for _ in range(40):
        if len(running) < BUCKETS[-1] and traffic.random.random() < 0.3:
            known = (
                traffic.random.choice(running)
                if running and traffic.random.random() < 0.5
                else None
            )
            sequence = traffic.start(traffic.random.randint(1, DRAFTER_LEN), known)
            traffic.prefill(sequence)
            running.append(sequence)
        elif running:
            batch = traffic.random.sample(running, traffic.random.randint(1, len(running)))
            traffic.decode([s for s in batch if len(s.tokens) < TARGET_LEN] or running[:0])
        running = [s for s in running if len(s.tokens) < TARGET_LEN]


def test_rows_that_do_not_fit_are_refused() -> None:
    traffic = Traffic(reads_states=True, seed=0)
    sequence = traffic.start(3)
    (key, *_) = traffic.table.drafts[1:]
    from rbln_vllm.worker.speculation.draft_inputs import DraftInputs, DraftRow

    inputs = DraftInputs(key, {}, BLOCK)
    long = DraftRow(np.zeros(key.query + 1, int), 0, np.zeros(key.query + 1, int), np.zeros(1, int))
    with pytest.raises(ValueError, match="do not fit program draft_b1_q4"):
        inputs.stage([long], None)
    assert sequence.computed == 0
