# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as the runner sees it: what is verified in a step, and what is drafted."""

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.gpu_input_batch import InputBatch

from rbln_vllm.shims import processors_beside_drafts
from rbln_vllm.worker.inputs import StepInputs
from rbln_vllm.worker.program_model import StepOutputs
from rbln_vllm.worker.sampling.paths import is_built_in, rows_changed_by
from rbln_vllm.worker.speculation.drafters import Drafter, DraftStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = init_logger(f"vllm.{__name__}")


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
        with processors_beside_drafts():
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
    barred = rows_without_drafts(batch, rows)
    return [[] if row in barred else drafts for row, drafts in enumerate(drafts_B)]


def rows_without_drafts(batch: InputBatch, rows: int) -> Collection[int]:
    """The rows whose logits depend on a state that cannot be taken back when drafts are rejected.

    That is what vLLM counts for a budget of thoughts, and what logits processors of one's own keep.
    """
    barred: set[int] = set()
    holder = batch.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        barred.update(holder._state)
    for processor in batch.logitsprocs.all:
        if is_built_in(processor):
            continue
        changed = rows_changed_by(processor)
        if changed is None:
            return range(rows)
        barred.update(changed)
    return barred


def warn_of_idle_drafts(processors: LogitsProcessors) -> None:
    """Say at start that nobody will have drafts, where that is so."""
    for processor in processors.all:
        if not is_built_in(processor) and rows_changed_by(processor) is None:
            logger.warning(
                "No request has drafts: nobody knows which ones the logits processor %s changes. "
                "Make it a subclass of AdapterLogitsProcessor, or leave out --speculative-config.",
                type(processor).__name__,
            )


def count_thoughts_by_row(batch: InputBatch) -> None:
    """Let vLLM's budgets of thoughts see one row of logits a request, as :class:`Verifier` does."""
    if batch.thinking_budget_state_holder is not None:
        batch.thinking_budget_state_holder.in_spec_mode = False
