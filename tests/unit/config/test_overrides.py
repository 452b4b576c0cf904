# SPDX-License-Identifier: Apache-2.0
"""`optimum_overrides`: sizes under optimum-rbln's names, checked and laid over vLLM's arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.config import OptimumRBLNConfig, effective_buckets
from rbln_vllm.config.overrides import CompileOverrides
from rbln_vllm.devices import HOST, resolve_profile


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"dtype": "float16"}, "use --dtype"),
        ({"max_len": 2}, "max_len is unknown; known are batch_size"),
        ({"num_devices": 2}, "num_devices 2: one worker over several devices (RSD) is not built"),
        ({"batch_size": 0}, "batch_size: Input should be greater than 0"),
        ({"batch_size": "4"}, "batch_size: Input should be a valid integer"),
        ({"prefill_chunk_size": 100}, "prefill_chunk_size 100 must be a positive multiple of 64"),
        (
            {"kvcache_block_size": 64, "kvcache_partition_len": 128},
            "kvcache_partition_len 128 must equal kvcache_block_size 64",
        ),
        ({"decoder_batch_sizes": []}, "decoder_batch_sizes is empty"),
        ({"attn_impl": "sdpa"}, "attn_impl: Input should be 'eager' or 'flash_attn'"),
    ],
)
def test_what_cannot_be_is_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="optimum_overrides: ") as caught:
        CompileOverrides.of(entries)
    assert words in str(caught.value)


def test_the_block_has_two_names() -> None:
    assert CompileOverrides.of({"kvcache_partition_len": 128}).block_size == 128
    assert CompileOverrides.of({"kvcache_block_size": 64}).block_size == 64
    assert CompileOverrides.of({}).block_size is None


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [([1], (1, 8)), ([8, 4, 2, 1], (1, 2, 4, 8)), ([4, 4], (4, 8)), ([8], (8,))],
)
def test_decode_buckets_ascend_to_the_batch_size(sizes: list[int], buckets: tuple[int]) -> None:
    config = OptimumRBLNConfig(optimum_overrides={"decoder_batch_sizes": sizes})
    assert effective_buckets(config, HOST, 8) == buckets


def test_a_bucket_above_the_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decoder_batch_sizes \[16\] are larger than the batch"):
        CompileOverrides.of({"decoder_batch_sizes": [16, 4]}).decode_buckets(8)


def test_buckets_that_are_not_given_are_the_devices() -> None:
    assert effective_buckets(OptimumRBLNConfig(), HOST, 8) == (1, 2, 4, 8)
    assert effective_buckets(OptimumRBLNConfig(), resolve_profile("RBLN-CR03"), 8) == (8,)


def arguments(**given: Any) -> Any:
    names = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size")
    return SimpleNamespace(**{**dict.fromkeys(names), **given})


def test_overrides_fill_what_is_not_given() -> None:
    from rbln_vllm.startup.engine_args import apply_overrides

    entries = {"batch_size": 4, "max_seq_len": 512, "prefill_chunk_size": 128}
    args = arguments(block_size=64)
    apply_overrides(args, CompileOverrides.of({**entries, "kvcache_block_size": 64}))
    assert vars(args) == {
        "max_num_seqs": 4,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "block_size": 64,
    }


@pytest.mark.parametrize(
    ("given", "entries", "words"),
    [
        ({"max_num_seqs": 2}, {"batch_size": 4}, "--max-num-seqs is 2, the override 4"),
        ({"block_size": 32}, {"kvcache_block_size": 64}, "--block-size is 32, the override 64"),
        ({"max_num_batched_tokens": 65}, {}, "--max-num-batched-tokens 65 must be a positive"),
    ],
)
def test_a_conflict_is_refused(given: dict[str, Any], entries: dict[str, Any], words: str) -> None:
    from rbln_vllm.startup.engine_args import apply_overrides

    with pytest.raises(ValueError, match=words):
        apply_overrides(arguments(**given), CompileOverrides.of(entries))
