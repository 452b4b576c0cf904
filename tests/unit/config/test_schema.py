# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest
from pydantic import ValidationError

from rbln_vllm.config import (
    CONFIG_CLASSES,
    ModelImpl,
    OptimumRBLNConfig,
    RBLNConfig,
    effective_buckets,
    effective_max_decode_steps,
    effective_max_prefill_run,
)
from rbln_vllm.config.options import Option, default_of, option_of
from rbln_vllm.devices import HOST, REBEL100, DeviceProfile

# Adding, renaming or re-defaulting an option is a decision: it shows up here.
COMMON = {
    "num_devices_per_local_rank": 1,
    "use_custom_sampler": True,
    "sub_block_size": None,
    "max_prefill_run": None,
    "max_decode_steps": None,
    "strict_programs": False,
    "require_precompiled": False,
}
FROZEN = {
    "vllm": COMMON
    | {
        "enforce_model_fp32": False,
        "use_batch_attn_opt": False,
        "use_custom_kernel": False,
        "use_dynamic_kv_cache": None,
        "enable_sub_block_cache": True,
        "specialize_moe_decode": True,
        "use_moe_tokens_mask": True,
        "use_all2all_dispatch": False,
        "use_all2all_combine": False,
        "decode_batch_bucket_strategy": "exponential",
        "decode_batch_bucket_min": 1,
        "decode_batch_bucket_step": 2,
        "decode_batch_bucket_limit": 1,
        "decode_batch_bucket_manual_buckets": (),
        "use_w8a8": False,
        "compile_dtype": "",
    },
    "transformers": COMMON
    | {
        "optimum_overrides": {},
        "user_max_num_batched_tokens": None,
        "num_blocks_override": None,
        "attn_block_size": None,
        "image_prefill_chunk_size": None,
        "cached_model_path": None,
        "num_blocks_synced": False,
    },
}
NOT_HASHED = {
    "vllm": {
        "use_custom_sampler",
        "enable_sub_block_cache",
        "sub_block_size",
        "max_prefill_run",
        "max_decode_steps",
        "strict_programs",
        "require_precompiled",
    },
    "transformers": {
        "use_custom_sampler",
        "sub_block_size",
        "max_prefill_run",
        "max_decode_steps",
        "strict_programs",
        "require_precompiled",
        "attn_block_size",
        "image_prefill_chunk_size",
        "cached_model_path",
        "num_blocks_synced",
    },
}


@pytest.mark.parametrize("impl", ["vllm", "transformers"])
def test_the_option_list_is_frozen(impl: ModelImpl) -> None:
    fields = CONFIG_CLASSES[impl].model_fields
    assert {name: default_of(info) for name, info in fields.items()} == FROZEN[impl]


@pytest.mark.parametrize("impl", ["vllm", "transformers"])
def test_what_the_cache_key_leaves_out_is_frozen(impl: ModelImpl) -> None:
    fields = CONFIG_CLASSES[impl].model_fields
    assert {name for name, info in fields.items() if not option_of(info).hashed} == NOT_HASHED[impl]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("num_devices_per_local_rank", 2, "RSD"),
        ("use_batch_attn_opt", True, "batched paged-attention"),
        ("use_custom_kernel", True, "Triton kernels"),
        ("use_dynamic_kv_cache", True, "after compilation"),
        ("use_all2all_dispatch", True, "expert parallelism"),
        ("use_all2all_combine", True, "expert parallelism"),
        ("use_w8a8", True, "fp8 activations"),
        ("compile_dtype", "bfloat16", "model's own type"),
    ],
)
def test_what_is_not_built_is_refused_in_words(field: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value!r} is not available: .*{reason}"):
        RBLNConfig.model_validate({field: value})


@pytest.mark.parametrize(
    "values",
    [
        {"use_custom_sampler": False},
        {"enable_sub_block_cache": False},
        {"use_dynamic_kv_cache": False},
        {"use_dynamic_kv_cache": None},
        {"specialize_moe_decode": False, "use_moe_tokens_mask": False},
        {"enforce_model_fp32": True},
        {"sub_block_size": None, "use_w8a8": False, "compile_dtype": ""},
        {"max_prefill_run": 0},
        {"strict_programs": True, "require_precompiled": True},
    ],
)
def test_accepted_values(values: dict[str, object]) -> None:
    config = RBLNConfig.model_validate(values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_devices_per_local_rank": 0}, "greater than 0"),
        ({"sub_block_size": 0}, "greater than 0"),
        ({"max_prefill_run": -1}, "greater than or equal to 0"),
        ({"max_decode_steps": 0}, "greater than 0"),
        ({"decode_batch_bucket_strategy": "exp"}, "'exponential', 'linear' or 'manual'"),
        ({"decode_batch_bucket_strategy": "manual"}, "is empty"),
        ({"decode_batch_bucket_manual_buckets": [0, 1]}, "must all be > 0"),
        ({"decode_batch_bucket_manual_buckets": [2, 2]}, "duplicate"),
        ({"decode_batch_bucket_min": 0}, "min is 0"),
        ({"decode_batch_bucket_limit": 0}, "limit is 0"),
        ({"decode_batch_bucket_step": 1}, "must be > 1"),
        ({"compile_dtype": "float8"}, "'float16' or 'bfloat16'"),
        ({"use_w8a8": "perhaps"}, "valid boolean"),
        ({"no_such_option": 1}, "Extra inputs are not permitted"),
    ],
)
def test_invalid_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RBLNConfig.model_validate(values)


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RBLNConfig().strict_programs = True


def test_pickling_keeps_what_was_given() -> None:
    config = RBLNConfig(decode_batch_bucket_limit=1).as_resolved()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.is_resolved
    assert copy.model_fields_set == {"decode_batch_bucket_limit"}
    assert copy.compute_hash() == config.compute_hash()
    assert not RBLNConfig(decode_batch_bucket_limit=1).is_resolved


@pytest.mark.parametrize(
    "values",
    [
        {"use_custom_sampler": False},
        {"enable_sub_block_cache": False},
        {"max_prefill_run": 7},
        {"max_decode_steps": 7},
        {"strict_programs": True},
        {"use_dynamic_kv_cache": None},
    ],
)
def test_hash_ignores_what_compiles_nothing(values: dict[str, object]) -> None:
    assert RBLNConfig.model_validate(values).compute_hash() == RBLNConfig().compute_hash()


@pytest.mark.parametrize(
    "values",
    [
        {"use_dynamic_kv_cache": False},
        {"enforce_model_fp32": True},
        # On HOST the same value means another set of buckets when it was not given.
        {"decode_batch_bucket_limit": 1},
        {"decode_batch_bucket_limit": 4},
        {"decode_batch_bucket_strategy": "manual", "decode_batch_bucket_manual_buckets": [1]},
    ],
)
def test_hash_sees_what_compiles_other_programs(values: dict[str, object]) -> None:
    assert RBLNConfig.model_validate(values).compute_hash() != RBLNConfig().compute_hash()


def test_hash_depends_on_the_class_and_overrides() -> None:
    plain = OptimumRBLNConfig()
    assert plain.compute_hash() != RBLNConfig().compute_hash()
    changed = OptimumRBLNConfig(optimum_overrides={"a": {"b": [1]}})
    assert changed.compute_hash() != plain.compute_hash()


@pytest.mark.parametrize(
    ("values", "profile", "expected"),
    [
        ({}, HOST, (1, 2, 4, 8, 16)),
        ({}, REBEL100, (16,)),
        ({"decode_batch_bucket_limit": 1}, HOST, (16,)),
        ({"decode_batch_bucket_limit": 2}, REBEL100, (8, 16)),
        ({"decode_batch_bucket_strategy": "exponential"}, REBEL100, (16,)),
        (
            {"decode_batch_bucket_strategy": "linear", "decode_batch_bucket_step": 4},
            HOST,
            (4, 8, 12, 16),
        ),
        (
            {
                "decode_batch_bucket_strategy": "manual",
                "decode_batch_bucket_manual_buckets": [16, 5],
            },
            REBEL100,
            (5, 16),
        ),
    ],
)
def test_bucket_options_not_given_follow_the_profile(
    values: dict[str, object], profile: DeviceProfile, expected: tuple[int, ...]
) -> None:
    assert effective_buckets(RBLNConfig.model_validate(values), profile, 16) == expected


def test_max_prefill_run_not_given_follows_the_profile() -> None:
    assert effective_max_prefill_run(RBLNConfig(), HOST) == HOST.default_max_prefill_run
    assert effective_max_prefill_run(RBLNConfig(), REBEL100) == 0
    assert effective_max_prefill_run(RBLNConfig(max_prefill_run=0), HOST) == 0
    assert effective_max_prefill_run(RBLNConfig(max_prefill_run=5), REBEL100) == 5


def test_max_decode_steps_not_given_follows_the_profile() -> None:
    assert effective_max_decode_steps(RBLNConfig(), HOST) == HOST.default_max_decode_steps
    assert effective_max_decode_steps(RBLNConfig(), REBEL100) == 1
    assert effective_max_decode_steps(RBLNConfig(max_decode_steps=3), REBEL100) == 3


def test_accepted_without_a_reason_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="only narrows"):
        Option("effect", accepted=(1,))
