# SPDX-License-Identifier: Apache-2.0
"""The options of both model implementations, typed, validated and frozen.

Pydantic rejects unknown fields and wrong types; `check_built` refuses what is not built yet.
A field the user did not give is known by `model_fields_set`, which survives pickling.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from rbln_vllm.buckets import check_bucket_parameters
from rbln_vllm.config.options import Option, check_built, default_of, option_of

BucketStrategy = Literal["exponential", "linear", "manual"]
ModelImpl = Literal["vllm", "transformers"]

_RSD = "RSD (one worker over several devices) is not built yet"
_BY_DEVICE = "when not given, the device profile decides"
_MOE_PARALLEL = "no effect yet: data and expert parallelism are refused"


class RBLNConfigBase(BaseModel):
    """Options of both implementations."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # True once `resolve` has merged the deprecated variables, so a child process that resolves
    # again takes the object as it is.
    _resolved: bool = PrivateAttr(default=False)

    num_devices_per_local_rank: Annotated[
        PositiveInt,
        Option("Devices per worker process (RSD width).", unbuilt=_RSD),
    ] = 1
    use_custom_sampler: Annotated[
        bool,
        Option("Take tokens from sampler programs; off: from vLLM's sampler.", hashed=False),
    ] = True
    sub_block_size: Annotated[
        PositiveInt | None,
        Option(
            "Granularity of prefix caching in tokens; None = the device's default, 16 on HOST "
            "and the chunk size on an NPU.",
            hashed=False,
        ),
    ] = None
    max_prefill_run: Annotated[
        NonNegativeInt | None,
        Option(
            "Consecutive prefill steps while decodes wait; 0 = unbounded, None = the device's "
            "default.",
            hashed=False,
        ),
    ] = None
    max_decode_steps: Annotated[
        PositiveInt | None,
        Option(
            "Decode steps in one turn of the engine while no request waits, at most 32 tokens of "
            "all rows; a turn's tokens are streamed together. None = the device's default.",
            hashed=False,
        ),
    ] = None
    strict_programs: Annotated[
        bool,
        Option("Refuse a request that would compile a program after start-up.", hashed=False),
    ] = False
    require_precompiled: Annotated[
        bool,
        Option("Refuse to start if a program is not in the cache.", hashed=False),
    ] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_built(self)
        return self

    @property
    def is_resolved(self) -> bool:
        return self._resolved

    def as_resolved(self) -> Self:
        """A copy that says the deprecated variables are already in it."""
        config = self.model_copy()
        config._resolved = True
        return config

    def changed_values(self) -> dict[str, Any]:
        """The fields that differ from their default, with their values."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in values.items() if value != default_of(fields[name])}

    def hashed_values(self) -> dict[str, Any]:
        """The values that can change a compiled program, by field name."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if option_of(info).hashed
        }

    def compute_hash(self) -> str:
        """Hex digest of `hashed_values`; vLLM's `VllmConfig.compute_hash` calls it."""
        text = json.dumps([type(self).__name__, self.hashed_values()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class RBLNConfig(RBLNConfigBase):
    """Options of the vllm implementation."""

    enforce_model_fp32: Annotated[bool, Option("Run the model in fp32.")] = False
    use_batch_attn_opt: Annotated[
        bool,
        Option(
            "Batched paged attention over rows sorted by length.",
            unbuilt="the batched paged-attention kernel is not built yet",
        ),
    ] = False
    use_custom_kernel: Annotated[
        bool,
        Option(
            "Use the vendor's Triton attention kernels.",
            unbuilt="the vendor's Triton kernels need its compiler",
        ),
    ] = False
    use_dynamic_kv_cache: Annotated[
        bool | None,
        Option(
            "Size the KV pool after compilation: True = required, None = where possible, "
            "False = the estimate.",
            unbuilt="sizing the KV pool after compilation is not built yet",
            accepted=(None, False),
        ),
    ] = None
    enable_sub_block_cache: Annotated[
        bool,
        Option("Prefix caching by sub-blocks; off: by whole blocks.", hashed=False),
    ] = True
    specialize_moe_decode: Annotated[
        bool,
        Option("Compile an extra decode variant for all ranks decoding.", note=_MOE_PARALLEL),
    ] = True
    use_moe_tokens_mask: Annotated[
        bool, Option("Mask padded tokens in the MoE kernel.", note=_MOE_PARALLEL)
    ] = True
    use_all2all_dispatch: Annotated[
        bool,
        Option(
            "All-to-all in place of all-gather for MoE dispatch.",
            unbuilt="expert parallelism is not built yet",
        ),
    ] = False
    use_all2all_combine: Annotated[
        bool,
        Option(
            "All-to-all in place of reduce-scatter for MoE combine.",
            unbuilt="expert parallelism is not built yet",
        ),
    ] = False
    decode_batch_bucket_strategy: Annotated[
        BucketStrategy, Option(f"How decode batch sizes are chosen; {_BY_DEVICE}.")
    ] = "exponential"
    decode_batch_bucket_min: Annotated[int, Option("Smallest decode bucket.")] = 1
    decode_batch_bucket_step: Annotated[
        int, Option("Divisor (exponential) or difference (linear) between buckets.")
    ] = 2
    decode_batch_bucket_limit: Annotated[
        int, Option(f"Largest number of decode buckets; {_BY_DEVICE}.")
    ] = 1
    decode_batch_bucket_manual_buckets: Annotated[
        tuple[int, ...], Option("The decode buckets of strategy `manual`.")
    ] = ()
    use_w8a8: Annotated[
        bool,
        Option(
            "8-bit activations in fp8 linear layers.",
            unbuilt="no toolchain kernel takes fp8 activations yet",
        ),
    ] = False
    compile_dtype: Annotated[
        Literal["", "float16", "bfloat16"],
        Option(
            "Type compiled programs compute in; empty = the model's.",
            unbuilt="this toolchain compiles programs in the model's own type",
        ),
    ] = ""

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        check_bucket_parameters(
            self.decode_batch_bucket_strategy,
            self.decode_batch_bucket_min,
            self.decode_batch_bucket_step,
            self.decode_batch_bucket_limit,
            self.decode_batch_bucket_manual_buckets,
        )
        return self

    def hashed_values(self) -> dict[str, Any]:
        values = super().hashed_values()
        # Auto and True compile the same programs.
        values["use_dynamic_kv_cache"] = self.use_dynamic_kv_cache is not False
        # A bucket option that was not given follows the device profile.
        given = self.model_fields_set
        values["given"] = sorted(name for name in given if name.startswith("decode_batch_bucket_"))
        return values


class OptimumRBLNConfig(RBLNConfigBase):
    """Options of the transformers implementation."""

    optimum_overrides: Annotated[
        dict[str, Any], Option("Entries laid over the derived compile configuration.")
    ] = Field(default_factory=dict)
    user_max_num_batched_tokens: Annotated[
        int | None, Option("The chunk size the user asked for.", flag=False)
    ] = None
    num_blocks_override: Annotated[
        int | None, Option("Copy of --num-gpu-blocks-override.", flag=False)
    ] = None
    attn_block_size: Annotated[
        int | None, Option("Derived: KV block of the artifact.", flag=False, hashed=False)
    ] = None
    image_prefill_chunk_size: Annotated[
        int | None, Option("Derived: image chunk of the artifact.", flag=False, hashed=False)
    ] = None
    cached_model_path: Annotated[
        str | None, Option("Derived: artifact found in the cache.", flag=False, hashed=False)
    ] = None
    num_blocks_synced: Annotated[
        bool, Option("Derived: the block count was synced.", flag=False, hashed=False)
    ] = False


CONFIG_CLASSES: dict[ModelImpl, type[RBLNConfig] | type[OptimumRBLNConfig]] = {
    "vllm": RBLNConfig,
    "transformers": OptimumRBLNConfig,
}


def implementations_of(field: str) -> tuple[ModelImpl, ...]:
    """The implementations whose config has `field`."""
    return tuple(impl for impl, cls in CONFIG_CLASSES.items() if field in cls.model_fields)
