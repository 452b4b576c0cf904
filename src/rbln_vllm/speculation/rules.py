# SPDX-License-Identifier: Apache-2.0
"""Rules of ``--speculative-config``: what is refused, in words, and what is settled."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rbln_vllm.distributed.kv_transfer.lmcache import CONNECTOR as LMCACHE
from rbln_vllm.geometry import options_of
from rbln_vllm.models.select import implementation_of
from rbln_vllm.speculation.draft_models import PROGRAM_METHODS, check_drafter, make_room

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

METHODS = ("ngram", "suffix", *PROGRAM_METHODS)
"""Those with a drafter, see worker/speculation/select.py."""
MOST_DRAFTS = {True: 32, False: 128}
"""Drafts of a request, with the RBLN sampler and with vLLM's."""

Rule = tuple[str, Callable[["SpeculativeConfig"], bool]]

RULES: tuple[Rule, ...] = (
    (
        "Drafts are the drafter's likeliest tokens: leave out draft_sample_method, or set it to "
        "greedy.",
        lambda s: s.draft_sample_method != "greedy",
    ),
    (
        "Verification is exact: leave out rejection_sample_method, or set it to standard.",
        lambda s: s.rejection_sample_method != "standard",
    ),
    (
        "A number of drafts that follows the batch size is not built yet: leave out "
        "num_speculative_tokens_per_batch_size.",
        lambda s: s.num_speculative_tokens_per_batch_size is not None,
    ),
    (
        "Parallel drafting is not supported: leave out parallel_drafting.",
        lambda s: s.parallel_drafting,
    ),
    (
        "Adaptive verification is not supported: leave out enable_adaptive_verification.",
        lambda s: s.enable_adaptive_verification,
    ),
    (
        "Multimodal drafters are not supported: use a drafter that reads text alone.",
        lambda s: s.draft_model_config is not None and s.draft_model_config.is_multimodal_model,
    ),
)


def settle_speculation(config: "VllmConfig") -> None:
    """ValueError, with the reason and the setting to change, for what cannot be served."""
    spec = config.speculative_config
    if spec is None:
        return
    if spec.method not in METHODS:
        raise ValueError(
            f"Unsupported speculative decoding method {spec.method!r}: use one of "
            f"{', '.join(METHODS)}"
        )
    for text, applies in RULES:
        if applies(spec):
            raise ValueError(text)
    check_drafter(config, implementation_of(config))
    make_room(config)
    _check_drafts(config, spec.num_speculative_tokens)
    _check_neighbours(config)


def _check_drafts(config: "VllmConfig", drafts: int) -> None:
    most = MOST_DRAFTS[options_of(config).use_custom_sampler]
    if drafts > most:
        raise ValueError(
            f"num_speculative_tokens is {drafts}: the sampler verifies at most {most} drafts of a "
            "request (32 with --rbln-use-custom-sampler, 128 without)"
        )
    if drafts >= config.model_config.max_model_len:
        raise ValueError(
            f"num_speculative_tokens is {drafts}, no less than --max-model-len "
            f"{config.model_config.max_model_len}: lower it"
        )


def _check_neighbours(config: "VllmConfig") -> None:
    """What the rest of the configuration must be beside drafts."""
    scheduler, spec = config.scheduler_config, config.speculative_config
    assert spec is not None
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == LMCACHE:
        raise ValueError(
            f"{LMCACHE} is not supported with speculative decoding yet: use OffloadingConnector "
            "(--kv-offloading-size GIB), or leave out --speculative-config."
        )
    needed = scheduler.max_num_seqs * (1 + spec.max_num_new_slots_for_drafting)
    if scheduler.max_num_batched_tokens < needed:
        raise ValueError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} does not hold a decode "
            f"step of --max-num-seqs {scheduler.max_num_seqs} with this method: it takes {needed}"
        )
