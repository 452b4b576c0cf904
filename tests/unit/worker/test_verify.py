# SPDX-License-Identifier: Apache-2.0
"""Verification is exact: tokens come as they would without drafts, however many stand."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors

from rbln_vllm.worker.sampling import ProgramSampler, SeededSampler
from rbln_vllm.worker.speculation.verify import ScheduledDrafts
from tests.unit.worker.sampling import bias, min_p
from tests.unit.worker.verifying import BOTH, MOST, Fixture, logits_of, step_of

LEAST = 0.09


def chi_square(counts: Counter[int], probability_V: Tensor) -> tuple[float, int]:
    """The statistic, and the number of tokens that can occur."""
    total = sum(counts.values())
    support = (probability_V > 0).nonzero()[:, 0].tolist()
    assert set(counts) <= set(support)
    expected = {token: float(probability_V[token]) * total for token in support}
    return sum((counts[t] - expected[t]) ** 2 / expected[t] for t in support), len(support)


def check_fit(counts: Counter[int], probability_V: Tensor) -> None:
    """Fails once in about 10^5 cases of a right distribution (Wilson and Hilferty)."""
    statistic, support = chi_square(counts, probability_V)
    degrees = support - 1
    spread = 2 / (9 * degrees)
    assert statistic < degrees * (1 - spread + 4.3 * spread**0.5) ** 3, (statistic, counts)


class TestScheduledDrafts:
    def test_rows_of_logits(self) -> None:
        drafts = ScheduledDrafts(((7, 8), (), (9,)))
        assert drafts.counts_B.tolist() == [3, 1, 2]
        assert drafts.first_B.tolist() == [0, 3, 4]
        assert drafts.most == 2
        assert [drafts.at(position).tolist() for position in range(3)] == [
            [0, 3, 4],
            [1, 3, 5],
            [2, 3, 5],
        ]

    def test_those_the_scheduler_names(self) -> None:
        drafts = ScheduledDrafts.of(["b", "a", "c"], {"a": [1, 2], "c": [3]})
        assert drafts is not None
        assert drafts.ids_B == ((), (1, 2), (3,))
        assert ScheduledDrafts.of(["a"], {}) is None
        assert ScheduledDrafts.of(["a"], {"a": []}) is None

    @pytest.mark.parametrize(
        ("tokens", "accepted"),
        [
            ([[1, 2, 3], [4, 0, 0], [5, 6, 0]], [2, 0, 1]),
            ([[1, 9, 3], [4, 0, 0], [9, 5, 0]], [1, 0, 0]),
            ([[9, 2, 3], [4, 0, 0], [5, 6, 0]], [0, 0, 1]),
            ([[1], [4], [9]], [1, 0, 0]),
        ],
    )
    def test_the_first_that_differs_ends_them(
        self, tokens: list[list[int]], accepted: list[int]
    ) -> None:
        drafts = ScheduledDrafts(((1, 2), (), (5,)))
        assert drafts.accepted(np.array(tokens)).tolist() == accepted

    def test_a_draft_that_is_none_never_stands(self) -> None:
        assert ScheduledDrafts(((-1, -1),)).accepted(np.array([[0, 0, 0]])).tolist() == [0]

    def test_none_at_all(self) -> None:
        with pytest.raises(ValueError, match="no verification"):
            ScheduledDrafts(((), ()))


class TestGreedy:
    @BOTH
    def test_tokens_until_the_first_that_differs(self, kind: type[SeededSampler]) -> None:
        logits = logits_of(6)
        best = logits.argmax(-1).tolist()
        wrong = (best[4] + 1) % 8
        drafts = [(best[0], best[1]), (), (wrong,)]
        tokens = Fixture([1, 2, 3], kind=kind).tokens(drafts, logits, step_of(3))
        assert tokens == [best[0:3], best[3:4], best[4:5]]

    def test_the_logits_programs_own_choice_is_taken(self) -> None:
        fixture = Fixture([1])
        fixture.sampler._greedy_tokens = lambda: torch.tensor([5, 6])
        assert fixture.tokens([(5,)], logits_of(2), step_of(1)) == [[5, 6]]
        assert fixture.store.names == []


class TestDraws:
    @BOTH
    @pytest.mark.parametrize("limits", [{}, {"top_k": 5, "top_p": 0.9}])
    def test_the_same_tokens_as_without_drafts(
        self, kind: type[SeededSampler], limits: dict[str, float]
    ) -> None:
        """Whatever is drafted, the seed's tokens come: right, wrong and missing drafts."""
        rng = random.Random(3)
        logits_P = logits_of(MOST + 1)
        seeds: list[int | None] = [11, 12, 13]
        changes: dict[str, Any] = {}
        if limits:
            changes["top_k"] = torch.full((3,), limits["top_k"], dtype=torch.int32)
            changes["top_p"] = torch.full((3,), limits["top_p"])
        for trial in range(20):
            outputs = [[0] * trial, [0] * (2 * trial), []]
            plain = [
                one_by_one(kind, seeds, [o + [0] * p for o in outputs], logits_P[p], changes)
                for p in range(MOST + 1)
            ]
            right = [[column[row] for column in plain] for row in range(3)]
            drafts = [damaged(right[row][:MOST], rng) for row in range(3)]
            if not any(drafts):
                continue
            logits = torch.cat([logits_P[: len(ids) + 1] for ids in drafts])
            fixture = Fixture(seeds, outputs, kind)
            step = step_of(3, 0.9, generators=generators_of(kind, seeds), **changes)
            tokens = fixture.tokens(drafts, logits, step)
            for row, ids in enumerate(drafts):
                stands = 0
                while stands < len(ids) and ids[stands] == right[row][stands]:
                    stands += 1
                assert tokens[row] == right[row][: stands + 1]

    @pytest.mark.parametrize("top_k", [None, 3])
    def test_the_distribution_is_the_targets(self, top_k: int | None) -> None:
        """Of the first token, of the second where the first draft stands, and of both together."""
        rows, vocabulary = 200, 6
        logits_P = logits_of(3, vocabulary, seed=5)
        draft = (int(logits_P[0].argmax()), int(logits_P[1].argmax()))
        changes: dict[str, Any] = {}
        if top_k:
            changes["top_k"] = torch.full((rows,), top_k, dtype=torch.int32)
        probability_PV = probabilities(logits_P, 0.8, top_k)
        at_P = [Counter[int]() for _ in range(3)]
        for block in range(10):
            seeds: list[int | None] = list(range(block * rows, (block + 1) * rows))
            step = step_of(rows, 0.8, **changes)
            for row in Fixture(seeds).tokens([draft] * rows, logits_P.repeat(rows, 1), step):
                for position, token in enumerate(row):
                    at_P[position][token] += 1
        for position in range(3):
            check_fit(at_P[position], probability_PV[position])
        stood = at_P[0][draft[0]]
        assert sum(at_P[1].values()) == stood, "a second token comes where the first draft stands"
        assert sum(at_P[2].values()) == at_P[1][draft[1]]
        assert min(sum(counts.values()) for counts in at_P) > 100

    @BOTH
    @pytest.mark.parametrize("name", ["min_p", "logit_bias"])
    def test_the_distribution_with_what_vllm_processes(
        self, kind: type[SeededSampler], name: str
    ) -> None:
        """As above: the draft stands with the probability that the target has after processing."""
        rows, vocabulary, temperature = 200, 6, 0.8
        logits_P = logits_of(3, vocabulary, seed=5) / 2
        draft = (int(logits_P[0].argmax()), int(logits_P[1].argmax()))
        if name == "min_p":
            processor: LogitsProcessor = min_p([LEAST] * rows)
            probability_PV = probabilities(logits_P, temperature, None)
            least_P1 = LEAST * probability_PV.max(-1, keepdim=True).values
            probability_PV = probability_PV.masked_fill(probability_PV < least_P1, 0)
            probability_PV /= probability_PV.sum(-1, keepdim=True)
            assert (probability_PV > 0).sum(-1).tolist() == [5, 2, 6]
        else:
            biases = {draft[0]: -0.7, draft[1]: 0.4}
            processor = bias(dict.fromkeys(range(rows), biases))
            biased_P = logits_P.clone()
            for token, value in biases.items():
                biased_P[:, token] += value
            probability_PV = probabilities(biased_P, temperature, None)
        at_P = [Counter[int]() for _ in range(3)]
        for block in range(10):
            seeds: list[int | None] = list(range(block * rows, (block + 1) * rows))
            step = step_of(
                rows,
                temperature,
                logitsprocs=LogitsProcessors([processor]),
                generators=generators_of(kind, seeds),
            )
            logits = logits_P.repeat(rows, 1)
            for row in Fixture(seeds, kind=kind).tokens([draft] * rows, logits, step):
                for position, token in enumerate(row):
                    at_P[position][token] += 1
        for position in range(3):
            check_fit(at_P[position], probability_PV[position])
        assert sum(at_P[1].values()) == at_P[0][draft[0]]
        assert min(sum(counts.values()) for counts in at_P) > 100

    def test_the_check_sees_a_wrong_distribution(self) -> None:
        """Upstream's fault: another temperature than the one asked for."""
        probability_V = probabilities(logits_of(1, 6, seed=5), 0.8, None)[0]
        other_V = probabilities(logits_of(1, 6, seed=5), 1.0, None)[0]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(other_V, 4000, replacement=True, generator=generator)
        with pytest.raises(AssertionError):
            check_fit(Counter(drawn.tolist()), probability_V)


def probabilities(logits_PV: Tensor, temperature: float, top_k: int | None) -> Tensor:
    scaled_PV = logits_PV.double() / temperature
    if top_k:
        least_P1 = scaled_PV.topk(top_k).values[:, -1:]
        scaled_PV = scaled_PV.masked_fill(scaled_PV < least_P1, -torch.inf)
    return scaled_PV.softmax(-1)


def generators_of(kind: type[SeededSampler], seeds: list[int | None]) -> dict[int, torch.Generator]:
    if kind is ProgramSampler:
        return {}
    return {row: torch.Generator() for row, seed in enumerate(seeds) if seed is not None}


def one_by_one(
    kind: type[SeededSampler],
    seeds: list[int | None],
    outputs: list[list[int]],
    logits_V: Tensor,
    changes: dict[str, Any],
) -> list[int]:
    """The tokens that a step without drafts would give."""
    fixture = Fixture(seeds, outputs, kind)
    step = step_of(len(seeds), 0.9, generators=generators_of(kind, seeds), **changes)
    logits = logits_V.repeat(len(seeds), 1)
    tokens: list[int] = fixture.sampler(logits, step).sampled_token_ids[:, 0].tolist()
    return tokens


def damaged(tokens: list[int], rng: random.Random) -> tuple[int, ...]:
    """The first few, perhaps with one that is wrong."""
    ids = tokens[: rng.randrange(len(tokens) + 1)]
    if ids and rng.random() < 0.5:
        at = rng.randrange(len(ids))
        ids[at] = (ids[at] + 1) % 8
    return tuple(ids)
