# SPDX-License-Identifier: Apache-2.0
"""Verification beside what vLLM processes: penalties, grammars, logprobs."""

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rbln_vllm.worker.sampling import SeededSampler
from rbln_vllm.worker.speculation.verify import REJECTED
from tests.unit.worker.sampling import bias, min_tokens
from tests.unit.worker.verifying import BOTH, Fixture, logits_of, step_of


class Once(LogitsProcessor):
    """Gives the second request token 5, and counts its steps."""

    def __init__(self) -> None:
        self.calls = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        raise NotImplementedError

    def apply(self, logits: Tensor) -> Tensor:
        assert logits.shape[0] == 2
        self.calls += 1
        logits[1, 5] = 100.0
        return logits


class TestProcessors:
    """What vLLM processes sees each position as if the drafts before it had been output."""

    @BOTH
    def test_repetition_is_penalised_within_the_drafts(self, kind: type[SeededSampler]) -> None:
        """Token 4 is best everywhere, until it has been output: then it is 3."""
        logits = torch.zeros(4, 8)
        logits[:, 4], logits[:, 3] = 2.0, 1.5
        outputs: list[list[int]] = [[], [4]]
        step = step_of(
            2,
            no_penalties=False,
            prompt_token_ids=torch.full((2, 1), 8),
            presence_penalties=torch.tensor([1.0, 1.0]),
            output_token_ids=outputs,
        )
        fixture = Fixture([1, 2], outputs, kind)
        assert fixture.tokens([(4,), (4,)], logits, step) == [[4, 3], [3]]
        assert fixture.outputs == [[], [4]], "drafts were left in the output"

    @BOTH
    def test_a_bad_word_may_end_after_a_draft(self, kind: type[SeededSampler]) -> None:
        logits = logits_of(3)
        best = logits.argmax(-1).tolist()
        outputs: list[list[int]] = [[]]
        step = step_of(1, bad_words_token_ids={0: [[best[0], best[1]]]}, output_token_ids=outputs)
        second = logits[1].argsort()[-2].item()
        tokens = Fixture([1], outputs, kind).tokens([(best[0], best[1])], logits, step)
        assert tokens == [[best[0], second]]

    @BOTH
    def test_the_least_length_is_reached_within_the_drafts(self, kind: type[SeededSampler]) -> None:
        """The end, token 0, is best everywhere and allowed as the third token of two at least."""
        logits = torch.zeros(4, 8)
        logits[:, 0], logits[:, 5] = 2.0, 1.0
        outputs: list[list[int]] = [[]]
        processor = min_tokens({0: (2, outputs[0], {0}, False)})
        step = step_of(1, logitsprocs=LogitsProcessors([processor]))
        tokens = Fixture([1], outputs, kind).tokens([(5, 5, 5)], logits, step)
        assert tokens == [[5, 5, 0]]

    @BOTH
    def test_allowed_tokens_at_each_position(self, kind: type[SeededSampler]) -> None:
        forbidden = torch.ones(1, 8, dtype=torch.bool)
        forbidden[0, [2, 6]] = False
        logits = logits_of(3)
        best = [2 if row[2] > row[6] else 6 for row in logits]
        step = step_of(1, allowed_token_ids_mask=forbidden)
        tokens = Fixture([1], kind=kind).tokens([(best[0], best[1])], logits, step)
        assert tokens == [best]

    @BOTH
    def test_a_bias_at_each_position_of_its_row(self, kind: type[SeededSampler]) -> None:
        logits = logits_of(5)
        best = logits.argmax(-1).tolist()
        step = step_of(2, logitsprocs=LogitsProcessors([bias({1: {7: 50.0}})]))
        drafts = [(best[0], best[1]), (7,)]
        assert Fixture([1, 2], kind=kind).tokens(drafts, logits, step) == [best[:3], [7, 7]]

    @BOTH
    def test_a_processor_of_ones_own_is_applied_once_a_step(
        self, kind: type[SeededSampler]
    ) -> None:
        """To all rows of the batch, each with the logits of its next token."""
        logits = logits_of(5)
        best = logits.argmax(-1).tolist()
        own = Once()
        step = step_of(2, logitsprocs=LogitsProcessors([own]))
        tokens = Fixture([1, 2], kind=kind).tokens([(best[0], best[1], best[2]), ()], logits, step)
        assert tokens == [best[:4], [5]]
        assert own.calls == 1

    @BOTH
    def test_logprobs_are_of_the_tokens_that_stand(self, kind: type[SeededSampler]) -> None:
        """Rows of unequal length, the last of which ends early."""
        logits = logits_of(6)
        best = logits.argmax(-1).tolist()
        drafts = [(best[0], best[1]), (), ((best[4] + 1) % 8,)]
        output = Fixture([1, 2, 3], kind=kind)(drafts, logits, step_of(3, max_num_logprobs=2))
        tokens, lists = RejectionSampler.parse_output(
            output.sampled_token_ids, 8, (), output.logprobs_tensors
        )
        assert [list(row) for row in tokens] == [best[0:3], best[3:4], best[4:5]]
        assert lists is not None
        assert lists.logprob_token_ids[:, 0].tolist() == best[:5]
        expected = logits.log_softmax(-1)[torch.arange(5), torch.tensor(best[:5])]
        assert np.allclose(lists.logprobs[:, 0], expected)
        assert lists.cu_num_generated_tokens == [0, 3, 4, 5]

    @BOTH
    def test_grammars_mask_each_position(self, kind: type[SeededSampler]) -> None:
        logits = logits_of(3)
        masks = torch.tensor([[1 << 2], [1 << 6], [1 << 1]], dtype=torch.int32)
        for changes in ({}, {"max_num_logprobs": 0}):
            fixture = Fixture([1], kind=kind)
            fixture.sampler.constrain(masks)
            tokens = fixture.tokens([(2, 6)], logits.clone(), step_of(1, **changes))
            assert tokens == [[2, 6, 1]]

    def test_positions_that_nobody_reaches_are_not_sampled(self) -> None:
        fixture = Fixture([1])
        output = fixture([(7, 7, 7)], torch.eye(4, 8), step_of(1, max_num_logprobs=0))
        assert output.sampled_token_ids.tolist() == [[0]]
        assert len(fixture.store.names) == 1

    def test_what_does_not_stand_is_marked(self) -> None:
        logits = torch.eye(5, 8)
        output = Fixture([1, 2])([(0, 1), (7,)], logits, step_of(2))
        assert output.sampled_token_ids.tolist() == [[0, 1, 2], [3, REJECTED, REJECTED]]
        assert output.sampled_token_ids.dtype == torch.int32
