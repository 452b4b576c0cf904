# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as the runner sees it: what is verified in a step, and what is drafted."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_input_batch import InputBatch

from rbln_vllm.worker.inputs import StepInputs
from rbln_vllm.worker.program_model import StepOutputs
from rbln_vllm.worker.speculation.drafters import Drafter, DraftStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UpstreamDrafter:
    """Where vLLM's runner would keep a drafter: ours are not called by it."""

    def __init__(self, _vllm_config: "VllmConfig") -> None:
        pass

    def propose(self, *_args: Any, **_kwargs: Any) -> list[list[int]]:
        raise NotImplementedError("drafts come from the runner's own drafter")


@contextmanager
def drafter_of_our_own(vllm_config: "VllmConfig") -> Iterator[None]:
    """Tell vLLM's runner, while it is made, that the drafter is a class it does not know.

    That is vLLM's method ``custom_class``. It then builds no drafter that runs modules, and calls
    for drafts when the step's tokens are known. The runner keeps this view of the configuration.
    """
    config = vllm_config.speculative_config
    if config is None:
        yield
        return
    view = copy.copy(config)
    view.method, view.model = "custom_class", f"{__name__}.{UpstreamDrafter.__name__}"
    vllm_config.speculative_config = view
    try:
        yield
    finally:
        vllm_config.speculative_config = config


def drafts_after(
    drafter: Drafter,
    batch: InputBatch,
    inputs: StepInputs,
    sampled_B: Sequence[Sequence[int]],
    outputs: StepOutputs,
) -> list[list[int]]:
    """Drafts for each row of a step that has just been sampled."""
    rows = inputs.num_sequences
    step = DraftStep(
        request_ids=tuple(batch.req_ids),
        inputs=inputs,
        sampled_B=sampled_B,
        tokens_BL=batch.token_ids_cpu[:rows],
        lengths_B=batch.num_tokens_no_spec[:rows],
        hidden_NH=outputs.hidden_NH,
        aux_NH=outputs.aux_NH,
    )
    drafts_B = drafter.propose(step)
    holder = batch.thinking_budget_state_holder
    if holder is None or not holder.has_tracked_requests():
        return drafts_B
    # What vLLM counts for a budget of thoughts cannot be taken back when drafts are rejected.
    return [[] if row in holder._state else drafts for row, drafts in enumerate(drafts_B)]


def count_thoughts_by_row(batch: InputBatch) -> None:
    """Let vLLM's budgets of thoughts see one row of logits a request, as :class:`Verifier` does."""
    if batch.thinking_budget_state_holder is not None:
        batch.thinking_budget_state_holder.in_spec_mode = False
