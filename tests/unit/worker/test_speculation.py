# SPDX-License-Identifier: Apache-2.0
"""What the runner asks of drafters, and what it tells vLLM of them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors

from rbln_vllm.worker.inputs import StepInputs
from rbln_vllm.worker.program_model import StepOutputs
from rbln_vllm.worker.speculation import speculation
from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter
from rbln_vllm.worker.speculation.speculation import (
    UpstreamDrafter,
    drafter_of_our_own,
    drafts_after,
    warn_of_idle_drafts,
)
from tests.unit.worker.sampling import Adapter, bias

TWO = np.arange(2)
INPUTS = StepInputs(TWO, TWO, TWO, np.ones(2, int), np.ones((2, 1), int))


class Drafter(HostDrafter):
    num_speculative_tokens = 2

    def propose(self, step: DraftStep) -> list[list[int]]:
        self.step = step
        return [[1, 2], [3]]


def batch_of(budgets: dict[int, Any] | None, *processors: Any) -> Any:
    holder = None
    if budgets is not None:
        holder = SimpleNamespace(has_tracked_requests=lambda: bool(budgets), _state=budgets)
    return SimpleNamespace(
        req_ids=["a", "b"],
        token_ids_cpu=np.zeros((4, 8), dtype=np.int32),
        num_tokens_no_spec=np.array([1, 2, 9, 9], dtype=np.int32),
        thinking_budget_state_holder=holder,
        logitsprocs=LogitsProcessors([bias({1: {3: 1.0}}), *processors]),
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


class Own(Adapter):
    """Nobody knows what it does."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@pytest.mark.parametrize(
    ("processors", "drafts"),
    [
        ([Adapter({})], [[1, 2], [3]]),
        ([Adapter({1: "a"})], [[1, 2], []]),
        ([Adapter({0: "a"}), Adapter({1: "b"})], [[], []]),
        ([Own({})], [[], []]),
    ],
)
def test_what_a_processor_of_ones_own_may_change_gets_no_drafts(
    processors: list[Any], drafts: list[list[int]]
) -> None:
    batch, outputs = batch_of(None, *processors), StepOutputs(torch.zeros(2, 3), None)
    assert drafts_after(Drafter(), batch, INPUTS, [[5], [6]], outputs) == drafts


def test_where_nobody_gets_drafts_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        speculation.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    warn_of_idle_drafts(LogitsProcessors([bias(), Adapter({0: "a"})]))
    assert not lines
    warn_of_idle_drafts(LogitsProcessors([Own({})]))
    (line,) = lines
    assert "the logits processor Own" in line
    assert "AdapterLogitsProcessor" in line


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
