# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any

import pytest

from rbln_vllm.devices import (
    GIB,
    HOST,
    MIB,
    PROFILES,
    REBEL100,
    Family,
    aligned_weight_bytes,
    npu_kv_budget,
    resolve_profile,
)

NPU_NAMES = [name for name in PROFILES if name != "HOST"]


def test_no_forced_name_is_the_host() -> None:
    assert resolve_profile(None) is HOST
    assert not HOST.is_dry_run
    assert HOST.dry_run_line() is None


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="RBLN-CA99") as caught:
        resolve_profile("RBLN-CA99")
    for name in PROFILES:
        assert name in str(caught.value)


@pytest.mark.parametrize("name", NPU_NAMES)
def test_npu_profiles_have_the_vendors_defaults(name: str) -> None:
    profile = resolve_profile(name)
    assert profile.name == name
    assert profile.default_max_num_seqs == 1
    assert profile.default_gpu_memory_utilization == 0.93
    assert profile.default_bucket_limit == 1
    assert profile.default_max_prefill_run == 0
    assert profile.default_chunk == (128 if name.startswith("RBLN-CA") else 512)


@pytest.mark.parametrize("name", NPU_NAMES)
def test_a_dry_run_says_so_in_one_line(name: str) -> None:
    profile = resolve_profile(name)
    line = profile.dry_run_line()
    assert profile.is_dry_run
    assert line is not None
    assert name in line
    assert "\n" not in line


def test_vllm_does_not_run_on_atom() -> None:
    for profile in PROFILES.values():
        assert ("vllm" in profile.implementations) == (profile.family is not Family.ATOM)
        assert "transformers" in profile.implementations


@pytest.mark.parametrize("size", [512, 1024, 8192, 16384])
def test_rebel100_accepts_powers_of_two(size: int) -> None:
    REBEL100.check_block_size(size)


@pytest.mark.parametrize("size", [0, -512, 128, 256, 513, 768, 1000, 32768])
def test_rebel100_refuses_other_blocks(size: int) -> None:
    with pytest.raises(ValueError, match="power of two from 512 to 16384"):
        REBEL100.check_block_size(size)


@pytest.mark.parametrize("size", [8, 16, 120, 65536])
def test_host_accepts_multiples_of_eight(size: int) -> None:
    HOST.check_block_size(size)


@pytest.mark.parametrize("size", [-8, 0, 1, 12, 100])
def test_host_refuses_other_blocks(size: int) -> None:
    with pytest.raises(ValueError, match="a positive multiple of 8"):
        HOST.check_block_size(size)


@pytest.mark.parametrize(
    ("max_model_len", "block"),
    [(32768, 8192), (8192, 8192), (8191, 4096), (5000, 4096), (2048, 2048), (100, 512)],
)
def test_rebel100_default_block_is_no_longer_than_a_sequence(
    max_model_len: int, block: int
) -> None:
    assert REBEL100.block_size_for(max_model_len) == block
    REBEL100.check_block_size(block)


def test_default_block_elsewhere() -> None:
    assert HOST.block_size_for(64) == HOST.default_block_size
    with pytest.raises(ValueError, match="--block-size is required on RBLN-CA25"):
        resolve_profile("RBLN-CA25").block_size_for(2048)


def test_block_ids_are_int16_on_rebel100() -> None:
    REBEL100.check_num_blocks(32_768)
    with pytest.raises(ValueError, match="32769 KV blocks are too many"):
        REBEL100.check_num_blocks(32_769)
    assert REBEL100.cap_num_blocks(100_000) == 32_768
    assert REBEL100.cap_num_blocks(5) == 5
    HOST.check_num_blocks(1_000_000)
    assert HOST.cap_num_blocks(1_000_000) == 1_000_000


@pytest.mark.parametrize(
    "change",
    [
        {"implementations": frozenset()},
        {"implementations": frozenset({"tensorrt"})},
        {"default_gpu_memory_utilization": 0.0},
        {"default_gpu_memory_utilization": 1.5},
        {"default_bucket_strategy": "random"},
        {"default_max_num_seqs": 0},
        {"default_max_prefill_run": -1},
        {"reserved_bytes": 200 * GIB},
        {"default_block_size": 500},
    ],
)
def test_profiles_check_themselves(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"RBLN-CR03|--block-size"):
        replace(REBEL100, **change)


def test_atom_budget_follows_the_vendors_estimate() -> None:
    atom = resolve_profile("RBLN-CA22")
    usable = int((16 * GIB - 288 * MIB) * 4 * 0.5)
    # Two programs on four devices, and one KV head replicated on four.
    buffers = 256 * MIB * 2 * 4
    assert npu_kv_budget(atom, 0.5, GIB, 2, 4) == usable - GIB - buffers
    assert npu_kv_budget(atom, 0.5, GIB, 2, 4, num_kv_heads=1) == (usable - GIB - buffers) // 4
    assert npu_kv_budget(atom, 0.5, GIB, 2, 4, num_kv_heads=8) == usable - GIB - buffers


def test_rebel100_budget_has_four_chiplets_and_one_device() -> None:
    assert npu_kv_budget(REBEL100, 1.0, 0, 3, 1) == 140 * GIB - 256 * MIB * 3 * 4
    with pytest.raises(ValueError, match="must be 1 on RBLN-CR03, not 2"):
        npu_kv_budget(REBEL100, 1.0, 0, 3, 2)


def test_budget_refuses_what_does_not_fit() -> None:
    with pytest.raises(MemoryError, match=r"Insufficient DRAM.*reducing gpu_memory_utilization"):
        npu_kv_budget(REBEL100, 0.93, 200 * GIB, 2, 1)


def test_host_has_no_static_estimate() -> None:
    with pytest.raises(ValueError, match="measure free memory"):
        npu_kv_budget(HOST, 0.5, 0, 1, 1)


def test_weights_are_aligned_part_by_part() -> None:
    assert aligned_weight_bytes([1, 2 * MIB, 2 * MIB + 1]) == (2 + 2 + 4) * MIB
    assert aligned_weight_bytes([]) == 0


@pytest.mark.parametrize(
    ("max_model_len", "block"),
    [(16_384, 8_192), (8_192, 8_192), (12_288, 12_288), (512, 512), (24_576, 8_192)],
)
def test_partitions_by_default(max_model_len: int, block: int) -> None:
    profile = resolve_profile("RBLN-CR03")
    assert profile.partition_for(max_model_len) == block
    profile.check_partition(block, max_model_len)


@pytest.mark.parametrize(
    ("name", "block", "max_model_len", "words"),
    [
        ("RBLN-CR03", 16_385, 16_385, "longer than 16384"),
        ("RBLN-CA25", 32_769, 32_769, "longer than 32768"),
        ("RBLN-CR03", 1_023, 4_096, "from 1024 to 16384"),
        ("RBLN-CA25", 32_769, 65_538, "from 1024 to 32768"),
        ("RBLN-CA25", 2_048, 5_000, "a multiple of the --block-size 2048"),
        ("RBLN-CA25", 8_192, 4_096, "twice as long"),
        ("HOST", 12, 256, "multiple of 8"),
    ],
)
def test_partitions_that_a_device_cannot_have(
    name: str, block: int, max_model_len: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_profile(name).check_partition(block, max_model_len)
