# SPDX-License-Identifier: Apache-2.0
"""What a model is compiled for: sizes from options, the model and the device."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.plan import CompilePlan, plan_compile
from rbln_vllm.optimum.recorded import RecordedConfig


def plan(npu: str | None = None, positions: int | None = 512, **options: Any) -> CompilePlan:
    config: Any = SimpleNamespace(
        architectures=["LlamaForCausalLM"], max_position_embeddings=positions
    )
    return plan_compile(config, RBLNModelConfig.of({**options, "npu": npu}))


def test_the_model_and_the_device_decide_what_is_not_given() -> None:
    found = plan()
    assert found.architecture.class_name == "RBLNLlamaForCausalLM"
    sizes = found.geometry
    assert (sizes.max_num_seqs, sizes.max_model_len, sizes.block_size) == (1, 512, 128)
    assert (found.chunk, sizes.chunk, sizes.decode_buckets) == (256, 256, (1,))


def test_a_chunk_is_cut_to_the_longest_sequence_but_recorded_as_asked() -> None:
    found = plan(max_seq_len=96, prefill_chunk_size=128)
    assert (found.geometry.chunk, found.chunk) == (96, 128)
    assert RecordedConfig.of(found, "m", "float32").prefill_chunk_size == 128


def test_the_default_chunk_has_room_for_a_decode_step() -> None:
    assert plan(batch_size=300).chunk == 320
    with pytest.raises(ValueError, match="prefill_chunk_size 64 is smaller than batch_size 65"):
        plan(batch_size=65, prefill_chunk_size=64)
    assert plan(batch_size=64, prefill_chunk_size=64).chunk == 64


@pytest.mark.parametrize(
    ("npu", "options", "block", "mode"),
    [
        (None, {}, 128, "flash"),
        (None, {"attn_impl": "eager"}, 512, "naive"),
        (None, {"kvcache_block_size": 512}, 512, "naive"),
        (None, {"attn_impl": "flash_attn"}, 128, "flash"),
        (None, {"attn_impl": "flash_attn", "kvcache_partition_len": 256}, 256, "flash"),
        ("RBLN-CA25", {}, 512, "naive"),
        ("RBLN-CR03", {"attn_impl": "eager"}, 512, "naive"),
    ],
)
def test_attention_is_a_matter_of_blocks(
    npu: str | None, options: dict[str, Any], block: int, mode: str
) -> None:
    geometry = plan(npu, **options).geometry
    assert (geometry.block_size, geometry.attention_mode) == (block, mode)


def test_flash_attention_on_an_npu_goes_over_its_partitions() -> None:
    found = plan("RBLN-CR03", positions=32_768)
    assert (found.geometry.block_size, found.geometry.num_blocks_per_seq) == (8_192, 4)
    recorded = RecordedConfig.of(found, "m", "float32")
    assert (recorded.attn_impl, recorded.kvcache_partition_len) == ("flash_attn", 8_192)


@pytest.mark.parametrize(
    ("npu", "options", "words"),
    [
        (None, {"attn_impl": "eager", "kvcache_block_size": 64}, "not in blocks of 64"),
        (
            None,
            {"attn_impl": "flash_attn", "kvcache_partition_len": 512},
            "one of 512 tokens holds",
        ),
        (None, {"attn_impl": "flash_attn", "max_seq_len": 128}, "one of 128 tokens holds"),
        (None, {"attn_impl": "eager", "max_seq_len": 100}, "block_size 100 does not work on HOST"),
        ("RBLN-CR03", {"attn_impl": "flash_attn"}, "one of 512 tokens holds a sequence of 512"),
        ("RBLN-CR03", {"kvcache_block_size": 64}, "is not from 1024 to 16384"),
        (None, {"max_seq_len": 513}, "max_seq_len 513 is longer than the 512 positions"),
        (None, {"batch_size": 2, "decoder_batch_sizes": [4]}, r"[4] are larger than the batch"),
        ("RBLN-XX99", {}, "unknown device 'RBLN-XX99'"),
    ],
)
def test_what_cannot_be_is_refused(npu: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan(npu, **options)


def test_a_length_must_come_from_somewhere() -> None:
    with pytest.raises(ValueError, match="does not say how long a sequence may be"):
        plan(positions=None)
    assert plan(positions=None, max_seq_len=64).geometry.max_model_len == 64


def test_a_model_that_generates_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row: Any = SimpleNamespace(name="BertModel", tasks=frozenset({"embed"}))
    monkeypatch.setattr("rbln_vllm.optimum.plan.check_architecture", lambda _: row)
    with pytest.raises(ValueError, match="BertModel generates no text, and only models that do"):
        plan()
