# SPDX-License-Identifier: Apache-2.0
"""What the runner asks of drafters, and what it tells vLLM of them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rbln_vllm.worker.inputs import StepInputs
from rbln_vllm.worker.program_model import StepOutputs
from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter
from rbln_vllm.worker.speculation.speculation import (
    UpstreamDrafter,
    drafter_of_our_own,
    drafts_after,
)

TWO = np.arange(2)
INPUTS = StepInputs(TWO, TWO, TWO, np.ones(2, int), np.ones((2, 1), int))


class Drafter(HostDrafter):
    num_speculative_tokens = 2

    def propose(self, step: DraftStep) -> list[list[int]]:
        self.step = step
        return [[1, 2], [3]]


def batch_of(budgets: dict[int, Any] | None) -> Any:
    holder = None
    if budgets is not None:
        holder = SimpleNamespace(has_tracked_requests=lambda: bool(budgets), _state=budgets)
    return SimpleNamespace(
        req_ids=["a", "b"],
        token_ids_cpu=np.zeros((4, 8), dtype=np.int32),
        num_tokens_no_spec=np.array([1, 2, 9, 9], dtype=np.int32),
        thinking_budget_state_holder=holder,
    )


@pytest.mark.parametrize(
    ("budgets", "drafts"),
    [(None, [[1, 2], [3]]), ({}, [[1, 2], [3]]), ({0: {}}, [[], [3]]), ({1: {}}, [[1, 2], []])],
)
def test_a_request_with_a_budget_of_thoughts_gets_no_drafts(
    budgets: dict[int, Any] | None, drafts: list[list[int]]
) -> None:
    drafter, hidden_NH = Drafter(), torch.zeros(2, 3)
    outputs = StepOutputs(hidden_NH, None)
    assert drafts_after(drafter, batch_of(budgets), INPUTS, [[5], [6]], outputs) == drafts
    assert drafter.step.request_ids == ("a", "b")
    assert drafter.step.lengths_B.tolist() == [1, 2]
    assert drafter.step.hidden_NH is hidden_NH


@dataclass
class Config:
    method: str = "eagle"
    model: str = "a path"


def test_vllms_runner_makes_no_drafter_of_its_own() -> None:
    config = Config()
    outer: Any = SimpleNamespace(speculative_config=config)
    with drafter_of_our_own(outer):
        view = outer.speculative_config
        assert view.method == "custom_class"
        assert view.model.endswith(f".{UpstreamDrafter.__name__}")
    assert outer.speculative_config is config
    assert (config.method, config.model) == ("eagle", "a path")


def test_nothing_is_changed_without_drafts() -> None:
    outer: Any = SimpleNamespace(speculative_config=None)
    with drafter_of_our_own(outer):
        assert outer.speculative_config is None
