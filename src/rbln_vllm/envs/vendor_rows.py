# SPDX-License-Identifier: Apache-2.0
"""The vendor's environment variables that only need to be known, as plain rows."""

from collections.abc import Callable
from typing import Any

from rbln_vllm.envs.parsers import (
    parse_bool,
    parse_bucket_strategy,
    parse_int_list,
    parse_optional_int,
)

_CCL = "no effect on HOST: belongs to the vendor's collective library"
_REPORT = "not built yet: the performance report at shutdown"

INERT: tuple[tuple[str, str, str], ...] = (
    ("VLLM_RBLN_METRICS", "Performance report at shutdown.", _REPORT),
    ("VLLM_RBLN_METRICS_FILE", "Mirror the report to this file.", _REPORT),
    ("VLLM_RBLN_METRICS_DIR", "Write the report as JSON per rank.", _REPORT),
    ("VLLM_RBLN_NUMA", "Bind workers to NUMA nodes.", "not built yet: NUMA binding"),
    (
        "VLLM_RBLN_COMPILE_STRICT_MODE",
        "Adds the compile mode `strict`.",
        "no effect on HOST: a mode of the vendor's compiler",
    ),
    (
        "VLLM_RBLN_USE_DEVICE_TENSOR",
        "Keep tensors on the device end to end.",
        "no effect on HOST: host memory is device memory",
    ),
    (
        "VLLM_RBLN_DISABLE_OFFLOAD",
        "Page weights to disk while loading.",
        "no effect on HOST: belongs to the vendor's torch backend",
    ),
    (
        "VLLM_RBLN_DISABLE_WORKER_FAIL_FAST",
        "Keep a worker alive on exceptions.",
        "not built yet: the worker fail-fast exit",
    ),
    ("VLLM_RBLN_AUTO_PORT", "Let the collective library choose ports.", _CCL),
    ("RBLN_ROOT_IP", "Address of the first node.", _CCL),
    ("RBLN_LOCAL_IP", "Address of this node.", _CCL),
    ("RBLN_PROFILER", "Record a device trace.", "not built yet: the profiler"),
    (
        "RBLN_RUNTIME_FORCE_SYNC",
        "Make the runtime synchronous.",
        "no effect on HOST: programs already run synchronously",
    ),
    (
        "RBLN_DUMMY_DEVICE",
        "Compile without a device.",
        "no effect on HOST: set RBLN_FORCE_NPU_NAME for a dry run",
    ),
)
"""Name, what the vendor's variable does, why setting it changes nothing here."""

DEPRECATED: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("VLLM_RBLN_NUM_DEVICES_PER_LOCAL_RANK", parse_optional_int, "num_devices_per_local_rank"),
    ("VLLM_RBLN_TP_SIZE", parse_optional_int, "num_devices_per_local_rank"),
    ("VLLM_RBLN_SAMPLER", parse_bool, "use_custom_sampler"),
    ("VLLM_RBLN_ENFORCE_MODEL_FP32", parse_bool, "enforce_model_fp32"),
    ("VLLM_RBLN_BATCH_ATTN_OPT", parse_bool, "use_batch_attn_opt"),
    ("RBLN_USE_CUSTOM_KERNEL", parse_bool, "use_custom_kernel"),
    ("VLLM_RBLN_USE_DYNAMIC_KV_CACHE", parse_bool, "use_dynamic_kv_cache"),
    ("VLLM_RBLN_SUB_BLOCK_CACHE", parse_bool, "enable_sub_block_cache"),
    ("VLLM_RBLN_SUB_BLOCK_SIZE", parse_optional_int, "sub_block_size"),
    ("VLLM_RBLN_SPECIALIZE_MOE_DECODE", parse_bool, "specialize_moe_decode"),
    ("VLLM_RBLN_USE_MOE_TOKENS_MASK", parse_bool, "use_moe_tokens_mask"),
    ("VLLM_RBLN_DISPATCH_ALL2ALL", parse_bool, "use_all2all_dispatch"),
    ("VLLM_RBLN_COMBINE_ALL2ALL", parse_bool, "use_all2all_combine"),
    (
        "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY",
        parse_bucket_strategy,
        "decode_batch_bucket_strategy",
    ),
    ("VLLM_RBLN_DECODE_BATCH_BUCKET_MIN", parse_optional_int, "decode_batch_bucket_min"),
    ("VLLM_RBLN_DECODE_BATCH_BUCKET_STEP", parse_optional_int, "decode_batch_bucket_step"),
    ("VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT", parse_optional_int, "decode_batch_bucket_limit"),
    (
        "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS",
        parse_int_list,
        "decode_batch_bucket_manual_buckets",
    ),
    ("VLLM_RBLN_USE_W8A8", parse_bool, "use_w8a8"),
)
"""Name, parser, the option that replaces it. Of two for one option the first that is set wins."""
