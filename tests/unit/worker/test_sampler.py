# SPDX-License-Identifier: Apache-2.0
"""A row gets the same tokens whichever path its step takes."""

from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.sampler import Sampler

from rbln_vllm.worker.sampling import ProgramSampler, SeededSampler
from tests.unit.worker.sampling import (
    CHANGES,
    ROWS,
    VOCABULARY,
    Fixture,
    bias,
    logits_of,
    metadata,
    min_p,
    sampled,
)


class TestGreedy:
    def test_the_logits_programs_tokens_are_taken(self) -> None:
        fixture = Fixture()
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids.tolist() == [[7], [8], [9]]
        assert output.sampled_token_ids.dtype == torch.int32
        assert fixture.store.names == []

    def test_not_where_the_logits_are_others(self) -> None:
        fixture = Fixture()
        fixture.greedy_R = torch.tensor([7])
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids[:, 0].tolist() == logits_of().argmax(-1).tolist()
        assert fixture.store.names == ["sampler_b4_q1"]

    def test_not_where_a_grammar_forbids(self) -> None:
        fixture = Fixture()
        bitmask = torch.full((ROWS, 3), -1, dtype=torch.int32)
        bitmask[1] = torch.tensor([0, 1 << 4, 0])
        fixture.sampler.constrain(bitmask)
        tokens = fixture.sampler(logits_of(), metadata()).sampled_token_ids[:, 0].tolist()
        best = logits_of().argmax(-1).tolist()
        assert tokens == [best[0], 36, best[2]]
        later = fixture.sampler(logits_of(), metadata()).sampled_token_ids[:, 0].tolist()
        assert later == [7, 8, 9], "a mask is of one step"

    def test_a_mask_does_not_stay(self) -> None:
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 2)
        fixture.sampler(logits_of(), sampled())
        free = fixture.sampler(logits_of(), sampled()).sampled_token_ids
        assert free.tolist() == Fixture().sampler(logits_of(), sampled()).sampled_token_ids.tolist()


NEUTRAL: dict[str, dict[str, Any]] = {
    "logprobs": {"max_num_logprobs": 2},
    "logit_bias": {"logitsprocs": LogitsProcessors([bias({0: {1: 0.0}})])},
    "min_p": {"logitsprocs": LogitsProcessors([min_p([1e-30, 0, 0])])},
    "allowed_token_ids": CHANGES["allowed_token_ids"],
}
"""What sends a step to vLLM's path and changes nothing."""


class TestPaths:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", NEUTRAL)
    def test_a_row_gets_the_same_tokens_on_both(self, name: str, dtype: torch.dtype) -> None:
        limits = {
            "top_k": torch.tensor([20, VOCABULARY, 40]).int(),
            "top_p": torch.tensor([0.9, 1.0, 0.95]),
        }
        for step in range(30):
            by_path = []
            for changes in ({}, NEUTRAL[name]):
                fixture = Fixture()
                fixture.batch.num_tokens_no_spec += step
                output = fixture.sampler(logits_of(step, dtype), sampled(**limits, **changes))
                by_path.append(output.sampled_token_ids.tolist())
                kinds = {name.partition("_")[0] for name in fixture.store.names}
                assert kinds == ({"draw"} if changes else {"sampler"})
            assert by_path[0] == by_path[1]

    def test_greedy_rows_beside_others(self) -> None:
        fixture = Fixture()
        for changes in ({}, NEUTRAL["logprobs"]):
            output = fixture.sampler(logits_of(), sampled(**changes))
            assert output.sampled_token_ids[1].item() == logits_of()[1].argmax()

    def test_masks_come_before_vllms_processing(self) -> None:
        fixture = Fixture()
        fixture.sampler.constrain(torch.tensor([[-1] * 3, [16, 0, 0], [-1] * 3]).int())
        output = fixture.sampler(logits_of(), sampled(max_num_logprobs=1))
        assert output.sampled_token_ids[1].item() == 4
        assert output.logprobs_tensors.logprobs[1].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("kind", ["logprobs", "logits"])
    def test_processed_scores_end_where_draws_do(self, kind: str) -> None:
        fixture = Fixture(mode=f"processed_{kind}")
        limits = {"top_k": torch.tensor([3, VOCABULARY, 3]).int(), "max_num_logprobs": 5}
        output = fixture.sampler(logits_of(), sampled(**limits))
        scores = output.logprobs_tensors.logprobs[0, 1:]
        assert torch.isfinite(scores).tolist() == [True] * 3 + [False] * 2
        best = (logits_of()[0] / 0.8).topk(3).values
        expected = best.log_softmax(0) if kind == "logprobs" else best
        assert torch.allclose(scores[:3], expected)

    @pytest.mark.parametrize("kind", ["logprobs", "logits"])
    def test_raw_scores_are_of_the_logits(self, kind: str) -> None:
        fixture = Fixture(mode=f"raw_{kind}")
        output = fixture.sampler(logits_of(), sampled(max_num_logprobs=3))
        expected = logits_of().log_softmax(-1) if kind == "logprobs" else logits_of()
        assert torch.allclose(output.logprobs_tensors.logprobs[:, 1:], expected.topk(3).values)


class TestVllmsSampler:
    def test_it_samples(self) -> None:
        output = Fixture(SeededSampler).sampler(logits_of(), metadata())
        assert output.sampled_token_ids[:, 0].tolist() == logits_of().argmax(-1).tolist()

    def test_a_draw_does_not_depend_on_those_before(self) -> None:
        """Upstream's generators go on: a token that was thrown away would change the rest."""
        results = []
        for thrown_away in (0, 3):
            fixture = Fixture(SeededSampler)
            generators = {0: torch.Generator().manual_seed(11)}
            for _ in range(thrown_away + 1):
                output = fixture.sampler(logits_of(), sampled(generators=generators))
            results.append(output.sampled_token_ids[0].item())
        assert results[0] == results[1]

    def test_masks_are_applied(self) -> None:
        fixture = Fixture(SeededSampler)
        fixture.sampler.constrain(torch.tensor([[-1] * 3, [16, 0, 0], [-1] * 3]).int())
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids[1].item() == 4

    def test_vllms_settings_are_kept(self) -> None:
        for kind in (SeededSampler, ProgramSampler):
            sampler = Fixture(kind, "processed_logits").sampler
            assert isinstance(sampler, Sampler)
            assert sampler.logprobs_mode == "processed_logits"


class TestBuffers:
    def test_a_logits_programs_buffer_is_used_in_place(self) -> None:
        """It has the rows of padding behind those of the step."""
        fixture = Fixture()
        buffer = torch.full((4, VOCABULARY), torch.nan)
        buffer[:ROWS] = logits_of()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        fixture.sampler.mask(buffer[:ROWS])
        assert (buffer[:ROWS] > -torch.inf).sum(-1).tolist() == [3] * ROWS
        assert buffer[3].isnan().all()
        assert fixture.store.names == ["mask_b4_q1"]

    def test_others_are_copied(self) -> None:
        logits = logits_of()
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        fixture.sampler.mask(logits)
        assert (logits > -torch.inf).sum(-1).tolist() == [3] * ROWS

    def test_draws_leave_the_logits_as_they_are(self) -> None:
        logits = logits_of()
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        tokens = fixture.sampler(logits, sampled()).sampled_token_ids[:, 0].tolist()
        assert set(tokens) <= {4, 36, 68}
        assert torch.equal(logits, logits_of())
