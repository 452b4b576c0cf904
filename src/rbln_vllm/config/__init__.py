# SPDX-License-Identifier: Apache-2.0
"""The options of the plugin: classes, flags, resolution. Imports no vLLM."""

from rbln_vllm.config.effective import (
    effective_buckets,
    effective_max_decode_steps,
    effective_max_prefill_run,
)
from rbln_vllm.config.resolve import AnyRBLNConfig, Resolution, resolve, resolve_config
from rbln_vllm.config.schema import (
    CONFIG_CLASSES,
    ModelImpl,
    OptimumRBLNConfig,
    RBLNConfig,
    RBLNConfigBase,
)

__all__ = [
    "CONFIG_CLASSES",
    "AnyRBLNConfig",
    "ModelImpl",
    "OptimumRBLNConfig",
    "RBLNConfig",
    "RBLNConfigBase",
    "Resolution",
    "effective_buckets",
    "effective_max_decode_steps",
    "effective_max_prefill_run",
    "resolve",
    "resolve_config",
]
