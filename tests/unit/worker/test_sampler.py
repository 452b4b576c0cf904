# SPDX-License-Identifier: Apache-2.0
"""When the program's own greedy tokens are the answer, and when vLLM's sampler must look."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from rbln_vllm.worker.sampler import ProgramSampler, is_plainly_greedy

ROWS, VOCABULARY = 2, 8
CONFIG: Any = SimpleNamespace(logprobs_mode="processed_logits", use_fp64_gumbel=True)


def metadata(**changes: Any) -> SamplingMetadata:
    """Two greedy rows that ask for nothing else."""
    zeros = torch.zeros(ROWS)
    plain = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([bias(), min_tokens()]),
    )
    return replace(plain, **changes)


def bias(biases: dict[int, dict[int, float]] | None = None) -> LogitBiasLogitsProcessor:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    processor.biases = biases or {}
    return processor


def min_tokens(rows: dict[int, Any] | None = None) -> MinTokensLogitsProcessor:
    config: Any = SimpleNamespace()
    processor = MinTokensLogitsProcessor(config, torch.device("cpu"), False)
    processor.min_toks = rows or {}
    return processor


def test_greedy_rows_that_ask_for_nothing_else() -> None:
    assert is_plainly_greedy(metadata())


@pytest.mark.parametrize(
    "changes",
    [
        {"all_greedy": False},
        {"max_num_logprobs": 0},
        {"max_num_logprobs": -1},
        {"logprob_token_ids": {0: [1]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logitsprocs": LogitsProcessors([bias({0: {1: 2.0}})])},
        {"logitsprocs": LogitsProcessors([min_tokens({0: (1, [], set(), False)})])},
        {
            "thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True),
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_rows_whose_logits_are_changed_or_reported(changes: dict[str, Any]) -> None:
    assert not is_plainly_greedy(metadata(**changes))


def test_a_processor_of_somebody_else_may_do_anything() -> None:
    class Own(LogitBiasLogitsProcessor):
        pass

    own = Own(None, torch.device("cpu"), False)
    assert not is_plainly_greedy(metadata(logitsprocs=LogitsProcessors([own])))


def test_the_programs_tokens_are_taken() -> None:
    logits_RV = torch.randn(ROWS, VOCABULARY, dtype=torch.bfloat16)
    sampler = ProgramSampler(CONFIG, lambda: torch.tensor([5, 3]))
    output = sampler(logits_RV, metadata())
    assert output.sampled_token_ids.tolist() == [[5], [3]]
    assert output.sampled_token_ids.dtype == torch.int32


@pytest.mark.parametrize("tokens", [None, torch.tensor([0, 0, 0])], ids=["masked", "other rows"])
def test_without_them_the_logits_decide(tokens: torch.Tensor | None) -> None:
    logits_RV = torch.eye(ROWS, VOCABULARY)
    sampler = ProgramSampler(CONFIG, lambda: tokens)
    assert sampler(logits_RV, metadata()).sampled_token_ids.tolist() == [[0], [1]]


def test_vllms_settings_of_the_sampler_are_kept() -> None:
    sampler = ProgramSampler(CONFIG, lambda: None)
    assert sampler.logprobs_mode == "processed_logits"
    assert sampler.use_fp64_gumbel
