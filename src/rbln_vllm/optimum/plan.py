# SPDX-License-Identifier: Apache-2.0
"""What would be compiled: sizes, programs and refusals, before any weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_vllm import envs
from rbln_vllm.buckets import decode_buckets
from rbln_vllm.config.overrides import CHUNK_MULTIPLE
from rbln_vllm.devices import DeviceProfile, resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.architectures import Architecture, Task, check_architecture
from rbln_vllm.optimum.options import RBLNModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Where configurations keep a model's longest sequence."""


@dataclass(frozen=True)
class CompilePlan:
    """The geometry of a compiled model, and what it was asked for.

    ``chunk`` is the prefill length as asked for; the geometry's is cut to the longest sequence.
    """

    architecture: Architecture
    geometry: Geometry
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < self.geometry.max_num_seqs:
            raise ValueError(
                f"prefill_chunk_size {self.chunk} is smaller than batch_size "
                f"{self.geometry.max_num_seqs}, whose decode steps share its budget of tokens: "
                "raise it, or lower batch_size"
            )


def plan_compile(config: "PretrainedConfig", options: RBLNModelConfig) -> CompilePlan:
    """The plan for a model's configuration.

    ValueError, in words, for an architecture, a device or sizes that cannot be.
    """
    architecture = check_architecture(architectures_of(config))
    if Task.GENERATE not in architecture.tasks:
        raise ValueError(
            f"{architecture.name} generates no text, and only models that do can be compiled ahead "
            "of time: serve it by its name, its programs are then kept in the compile cache"
        )
    profile = resolve_profile(options.npu or envs.force_npu_name())
    batch = options.batch_size or 1
    longest = max_seq_len_of(config, options.max_seq_len)
    chunk = options.prefill_chunk_size or _default_chunk(profile, batch)
    block = options.attention_block(options.block_size, longest, profile)
    buckets = options.decode_buckets(batch) or decode_buckets(
        profile.default_bucket_strategy, batch, limit=profile.default_bucket_limit
    )
    geometry = Geometry(profile, min(chunk, longest), block, longest, batch, buckets)
    return CompilePlan(architecture, geometry, chunk)


def architectures_of(config: Any) -> Sequence[str]:
    return tuple(getattr(config, "architectures", None) or ())


def max_seq_len_of(config: Any, asked: int | None) -> int:
    """Tokens of the longest sequence: as asked, else the model's own.

    ValueError for more than the model has positions, or when neither says a length.
    """
    limit = next((n for name in LENGTHS if (n := getattr(config, name, None))), None)
    if asked is None and limit is None:
        raise ValueError(
            "this model's configuration does not say how long a sequence may be: give max_seq_len"
        )
    if asked is not None and limit is not None and asked > limit:
        raise ValueError(
            f"max_seq_len {asked} is longer than the {limit} positions that the model has: lower it"
        )
    return int(asked or limit or 0)


def _default_chunk(profile: DeviceProfile, batch: int) -> int:
    """The device's chunk, or enough for a decode step of all sequences."""
    return max(profile.default_chunk, -(-batch // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
