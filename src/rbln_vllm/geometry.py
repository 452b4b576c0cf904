# SPDX-License-Identifier: Apache-2.0
"""The sizes that programs, scheduler, runner and cache agree on, read once from vLLM's config."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rbln_vllm import envs
from rbln_vllm.config import AnyRBLNConfig, OptimumRBLNConfig, RBLNConfig, effective_buckets
from rbln_vllm.config.overrides import CompileOverrides
from rbln_vllm.devices import DeviceProfile, resolve_profile
from rbln_vllm.pooling.config import Pooling, pooling_of
from rbln_vllm.pooling.programs import EncoderTable, PoolingTable
from rbln_vllm.programs import DrafterShape, ProgramTable
from rbln_vllm.speculation.draft_models import drafter_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Geometry:
    """All sizes in tokens or counts.

    ``chunk`` is the prefill length C, ``decode_buckets`` the compiled decode batch sizes,
    ``decode_queries`` the lengths of a decode row, ``drafter`` the sizes of a model that drafts.
    ``pooling`` is None for a model that generates text. ``takes_embeds``: its programs take
    embeddings, which others look up for tokens.
    """

    profile: DeviceProfile
    chunk: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    decode_queries: tuple[int, ...] = (1,)
    drafter: DrafterShape | None = None
    pooling: Pooling | None = None
    takes_embeds: bool = False

    def __post_init__(self) -> None:
        if min(self.chunk, self.block_size, self.max_model_len, self.max_num_seqs) < 1:
            raise ValueError(f"sizes must be positive: {self}")

    @property
    def num_blocks_per_seq(self) -> int:
        """Width T of the block table: blocks of one sequence of ``max_model_len`` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def attention_mode(self) -> str:
        """``naive`` when a sequence is one block, otherwise ``flash``."""
        return "naive" if self.block_size == self.max_model_len else "flash"

    @property
    def table(self) -> ProgramTable:
        """Every program of this configuration."""
        sizes = (
            self.chunk,
            self.decode_buckets,
            self.block_size,
            self.num_blocks_per_seq,
            self.decode_queries,
        )
        if self.pooling is None:
            return ProgramTable(*sizes, drafter=self.drafter, takes_embeds=self.takes_embeds)
        head = self.pooling.has_head
        if not self.pooling.is_encoder:
            return PoolingTable(*sizes, has_head=head)
        most, tokens = self.max_model_len, self.pooling.step_tokens
        return EncoderTable(*sizes, has_head=head, max_length=most, max_tokens=tokens)


def options_of(vllm_config: "VllmConfig") -> AnyRBLNConfig:
    """The resolved options, whose class says which implementation was selected.

    TypeError when the config was not made through the plugin.
    """
    options = vllm_config.additional_config
    if not isinstance(options, RBLNConfig | OptimumRBLNConfig):
        raise TypeError(
            "this VllmConfig carries no resolved RBLNConfig or OptimumRBLNConfig; build it with "
            "EngineArgs(...).create_engine_config()"
        )
    return options


def geometry_of(vllm_config: "VllmConfig") -> Geometry:
    """The geometry of a finished configuration."""
    profile = resolve_profile(envs.force_npu_name())
    scheduler = vllm_config.scheduler_config
    pipeline = vllm_config.parallel_config.pipeline_parallel_size
    return Geometry(
        profile=profile,
        chunk=chunk_size(vllm_config),
        block_size=vllm_config.cache_config.block_size,
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        decode_buckets=effective_buckets(
            options_of(vllm_config), profile, scheduler.max_num_seqs // pipeline
        ),
        decode_queries=decode_queries(vllm_config),
        drafter=drafter_shape(vllm_config),
        pooling=pooling_of(vllm_config),
        takes_embeds=takes_embeds(vllm_config),
    )


def takes_embeds(vllm_config: "VllmConfig") -> bool:
    """Whether programs take embeddings: for ``--enable-prompt-embeds``, or as the transformers
    implementation was told to compile them."""
    if vllm_config.model_config.enable_prompt_embeds:
        return True
    options = options_of(vllm_config)
    if not isinstance(options, OptimumRBLNConfig):
        return False
    return bool(CompileOverrides.of(options.optimum_overrides).use_inputs_embeds)


def decode_queries(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """The compiled lengths of a decode row: 1, and K + 1 with up to K drafts.

    Drafters that read the target's hidden states (eagle, eagle3, mtp) draft for nearly every row
    of every step, so for them a program for steps without drafts would hardly run.
    """
    config = vllm_config.speculative_config
    if config is None:
        return (1,)
    with_drafts = int(config.num_speculative_tokens) + 1
    return (with_drafts,) if config.use_eagle() else (1, with_drafts)


def chunk_size(vllm_config: "VllmConfig") -> int:
    """C, the tokens of a prefill program and the most a prefill step computes.

    ``long_prefill_token_threshold`` shortens C for good: were it applied only while others wait,
    as upstream does, chunks would start anywhere. A chunk longer than the longest sequence
    would only be padding.
    """
    scheduler = vllm_config.scheduler_config
    limits = (
        scheduler.max_num_batched_tokens,
        scheduler.max_num_scheduled_tokens,
        scheduler.long_prefill_token_threshold,
        vllm_config.model_config.max_model_len,
    )
    return min(int(limit) for limit in limits if limit)


def program_table(vllm_config: "VllmConfig") -> ProgramTable:
    """Every program of a finished configuration."""
    return geometry_of(vllm_config).table
