# SPDX-License-Identifier: Apache-2.0
"""Drafters that are models: which methods have them, what their programs are, what is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_vllm.programs import DrafterShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROGRAM_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods whose drafter is a model."""

DRAFTERS = {
    "eagle": ("EagleLlamaForCausalLM",),
    "eagle3": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "medusa": ("MedusaModel",),
    "mtp": ("MiMoMTPModel",),
}
"""The drafters of each method that are known to work."""


@dataclass(frozen=True)
class DraftRefusal:
    """``applies`` to a speculative configuration, then ``text`` is what the user is told."""

    text: str
    applies: Callable[[Any], bool]


REFUSALS = (
    DraftRefusal(
        "use_heterogeneous_vocab is not supported: use a draft model of the target's vocabulary",
        lambda s: s.use_heterogeneous_vocab,
    ),
    DraftRefusal(
        "A quantised draft model is not supported yet: use the unquantised one",
        lambda s: s.draft_model_config.quantization is not None,
    ),
    DraftRefusal(
        "The drafter's attention_backend and kv_cache_dtype are the target's: leave them out",
        lambda s: s.attention_backend is not None or s.kv_cache_dtype is not None,
    ),
)


def drafts_by_program(vllm_config: "VllmConfig") -> bool:
    """Whether a model drafts, so that there are programs for it."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method in PROGRAM_METHODS


def drafter_shape(vllm_config: "VllmConfig") -> DrafterShape | None:
    """Sizes of the drafter's programs; None where no model drafts.

    After a step a row has up to K + 1 new tokens. A draft model reads them and, for a row whose
    prompt was found in the prefix cache, the one before them; the others read each new token at
    the place of the one before it.
    """
    if not drafts_by_program(vllm_config):
        return None
    speculation = vllm_config.speculative_config
    assert speculation is not None
    most_new = int(speculation.num_speculative_tokens) + 1
    if speculation.method == "medusa":
        return DrafterShape(query=1, keeps_kv=False)
    return DrafterShape(most_new + (speculation.method == "draft_model"), keeps_kv=True)


def check_drafter(vllm_config: "VllmConfig", implementation: str) -> None:
    """ValueError, with what to change, for a drafter that has no programs."""
    if not drafts_by_program(vllm_config):
        return
    speculation: Any = vllm_config.speculative_config
    for refusal in REFUSALS:
        if refusal.applies(speculation):
            raise ValueError(refusal.text)
    if implementation == "transformers" and speculation.method != "draft_model":
        raise ValueError(
            f"Speculative decoding with {speculation.method} needs --model-impl vllm: its drafters "
            "are vLLM's modules. The transformers implementation has draft_model, ngram and suffix"
        )
    _check_architecture(speculation)


def _check_architecture(speculation: Any) -> None:
    known = DRAFTERS.get(speculation.method)
    architectures = tuple(speculation.draft_model_config.architectures)
    if known is not None and not set(architectures) & set(known):
        raise ValueError(
            f"Speculative decoding with {speculation.method} is not supported for the drafter "
            f"{', '.join(architectures)}: supported are {', '.join(known)}. "
            "Use draft_model or ngram"
        )


def make_room(vllm_config: "VllmConfig") -> None:
    """Keep the chunk as long as it is without drafts.

    vLLM counts one token more a row against a step for the first pass of a draft model. Here that
    pass is a program of its own, so the step may hold them all.
    """
    speculation, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if speculation is None or not speculation.uses_draft_model():
        return
    chunk = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    # Settled once: this runs again in the engine's process.
    scheduler.max_num_scheduled_tokens = chunk
    rows = scheduler.max_num_seqs * speculation.max_num_new_slots_for_drafting
    scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, chunk + rows)
