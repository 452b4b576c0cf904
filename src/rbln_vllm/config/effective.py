# SPDX-License-Identifier: Apache-2.0
"""Options whose default depends on the device: the user's value, else the profile's."""

from rbln_vllm.buckets import decode_buckets
from rbln_vllm.config.overrides import CompileOverrides
from rbln_vllm.config.schema import OptimumRBLNConfig, RBLNConfig, RBLNConfigBase
from rbln_vllm.devices import DeviceProfile


def effective_buckets(
    config: RBLNConfig | OptimumRBLNConfig, profile: DeviceProfile, max_batch: int
) -> tuple[int, ...]:
    """The decode buckets, ascending, for decode batches up to `max_batch`.

    Each bucket option the user did not give takes the profile's default (field by field: a
    user who only picks a strategy keeps the profile's limit).

    Raises ValueError as `decode_buckets` and `CompileOverrides.decode_buckets` do.
    """
    if isinstance(config, OptimumRBLNConfig):
        sizes = CompileOverrides.of(config.optimum_overrides).decode_buckets(max_batch)
        return sizes or decode_buckets(
            profile.default_bucket_strategy, max_batch, limit=profile.default_bucket_limit
        )
    given = config.model_fields_set
    strategy: str = config.decode_batch_bucket_strategy
    if "decode_batch_bucket_strategy" not in given:
        strategy = profile.default_bucket_strategy
    limit = config.decode_batch_bucket_limit
    if "decode_batch_bucket_limit" not in given:
        limit = profile.default_bucket_limit
    return decode_buckets(
        strategy,
        max_batch,
        minimum=config.decode_batch_bucket_min,
        step=config.decode_batch_bucket_step,
        limit=limit,
        manual=config.decode_batch_bucket_manual_buckets,
    )


def effective_max_prefill_run(config: RBLNConfigBase, profile: DeviceProfile) -> int:
    """Consecutive prefill steps allowed while decodes wait; 0 = unbounded."""
    if config.max_prefill_run is None:
        return profile.default_max_prefill_run
    return config.max_prefill_run


def effective_max_decode_steps(config: RBLNConfigBase, profile: DeviceProfile) -> int:
    """Decode steps the engine takes in one turn while no request waits."""
    if config.max_decode_steps is None:
        return profile.default_max_decode_steps
    return config.max_decode_steps
