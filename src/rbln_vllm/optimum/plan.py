# SPDX-License-Identifier: Apache-2.0
"""What would be compiled: sizes, programs and refusals, before any weight is read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_vllm import envs
from rbln_vllm.buckets import decode_buckets
from rbln_vllm.config.overrides import CHUNK_MULTIPLE
from rbln_vllm.devices import DeviceProfile, resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.architectures import Architecture
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.pooling.config import Pooling, encoder_step_tokens, positions_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Where configurations keep a model's longest sequence."""
OF_KV = ("kvcache_block_size", "kvcache_partition_len", "attn_impl")
"""Options of the KV cache, which encoders do not have."""
OF_TEXT = ("num_speculative_tokens", "use_inputs_embeds", "lora_config")
"""Options of models that generate text."""
MOST_DRAFTS = 128
"""Drafts of a sequence that vLLM's sampler verifies; the RBLN sampler 32."""


@dataclass(frozen=True)
class CompilePlan:
    """The geometry of a compiled model, and what it was asked for.

    ``chunk`` is the prefill length as asked for, which the geometry cuts to the longest sequence;
    of an encoder it is the tokens of a step.
    """

    architecture: Architecture
    geometry: Geometry
    chunk: int

    def __post_init__(self) -> None:
        sizes = self.geometry
        if sizes.decode_queries[-1] > sizes.max_model_len:
            raise ValueError(
                f"num_speculative_tokens {sizes.decode_queries[-1] - 1} is no less than "
                f"max_seq_len {sizes.max_model_len}: lower it"
            )
        if self.chunk < sizes.max_num_seqs:
            raise ValueError(
                f"prefill_chunk_size {self.chunk} is smaller than batch_size "
                f"{sizes.max_num_seqs}, whose decode steps share its budget of tokens: "
                "raise it, or lower batch_size"
            )
        if self.architecture.encoder and self.chunk < sizes.max_model_len:
            raise ValueError(
                f"prefill_chunk_size {self.chunk} is smaller than max_seq_len "
                f"{sizes.max_model_len}: an encoder computes a text in one step. Raise it, or "
                "lower max_seq_len"
            )


def plan_compile(
    config: "PretrainedConfig",
    options: RBLNModelConfig,
    architecture: Architecture,
    longest_text: int | None = None,
) -> CompilePlan:
    """The plan for a model's configuration.

    ``longest_text`` is a limit from beside the model, see ``sentence.py``. ValueError, in words,
    for a device, options or sizes that cannot be.
    """
    _check_options(architecture, options)
    profile = resolve_profile(options.npu or envs.force_npu_name())
    batch = options.batch_size or 1
    longest = max_seq_len_of(config, options.max_seq_len, longest_text)
    chunk = options.prefill_chunk_size or _default_chunk(architecture, profile, batch, longest)
    block = options.attention_block(options.block_size, longest, profile)
    buckets = options.decode_buckets(batch) or decode_buckets(
        profile.default_bucket_strategy, batch, limit=profile.default_bucket_limit
    )
    geometry = Geometry(
        profile,
        min(chunk, longest),
        block,
        longest,
        batch,
        buckets,
        queries_of(options.num_speculative_tokens or 0),
        takes_embeds=bool(options.use_inputs_embeds),
        pooling=Pooling.compiled(architecture, chunk),
    )
    return CompilePlan(architecture, geometry, chunk)


def max_seq_len_of(config: Any, asked: int | None, longest_text: int | None = None) -> int:
    """Tokens of the longest sequence: as asked, else the model's own.

    ValueError for more than the model has positions, or when neither says a length.
    """
    rows = next((n for name in LENGTHS if (n := getattr(config, name, None))), None)
    limits = (longest_text, positions_of(config), rows)
    limit = min((limit for limit in limits if limit), default=None)
    if asked is None and limit is None:
        raise ValueError(
            "this model's configuration does not say how long a sequence may be: give max_seq_len"
        )
    if asked is not None and limit is not None and asked > limit:
        raise ValueError(
            f"max_seq_len {asked} is longer than the {limit} positions that the model has: lower it"
        )
    return int(asked or limit or 0)


def queries_of(num_drafts: int) -> tuple[int, ...]:
    """The lengths of a decode row, where a step verifies up to so many drafts."""
    return (1, num_drafts + 1) if num_drafts else (1,)


def _check_options(architecture: Architecture, options: RBLNModelConfig) -> None:
    """ValueError for options that mean nothing for this kind of model."""
    reasons = (
        (OF_KV, architecture.encoder, "is an encoder and keeps no KV"),
        (OF_TEXT, architecture.only_pools, "generates no text"),
    )
    for names, applies, reason in reasons:
        given = [name for name in names if getattr(options, name)]
        if applies and given:
            raise ValueError(f"{architecture.name} {reason}: leave out {', '.join(given)}")
    beside = [n for n in ("num_speculative_tokens", "lora_config") if getattr(options, n)]
    if options.use_inputs_embeds and beside:
        raise ValueError(
            f"use_inputs_embeds is not supported together with {', '.join(beside)} yet: leave one "
            "of them out"
        )
    drafts = options.num_speculative_tokens or 0
    if drafts > MOST_DRAFTS:
        raise ValueError(
            f"num_speculative_tokens {drafts}: a step verifies at most {MOST_DRAFTS} drafts of a "
            "sequence. Lower it"
        )


def _default_chunk(
    architecture: Architecture, profile: DeviceProfile, batch: int, longest: int
) -> int:
    """The device's chunk, or enough for a decode step of all sequences; of an encoder enough for
    the longest text."""
    wanted = profile.default_chunk
    if architecture.encoder:
        wanted = encoder_step_tokens(longest, batch)
    return -(-max(wanted, batch) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
