# SPDX-License-Identifier: Apache-2.0
"""What a model is compiled for: sizes from options, the model and the device."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.models.architectures import ARCHITECTURES
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.plan import CompilePlan, plan_compile
from rbln_vllm.optimum.recorded import RecordedConfig

ADAPTERS = {"adapters": [{"lora_int_id": 1, "lora_name": "a", "lora_path": "/a"}]}


def plan(npu: str | None = None, positions: int | None = 512, **options: Any) -> CompilePlan:
    config: Any = SimpleNamespace(max_position_embeddings=positions)
    row = ARCHITECTURES["LlamaForCausalLM"]
    return plan_compile(config, RBLNModelConfig.of({**options, "npu": npu}), row)


def pooling_plan(
    name: str, longest_text: int | None = None, positions: int = 514, **options: Any
) -> CompilePlan:
    row = ARCHITECTURES[name]
    config: Any = SimpleNamespace(
        max_position_embeddings=positions,
        pad_token_id=1,
        model_type=row.model_type.replace("_", "-"),
    )
    return plan_compile(config, RBLNModelConfig.of(options), row, longest_text)


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


@pytest.mark.parametrize("drafts", [1, 2, 128])
def test_a_decode_row_holds_drafts(drafts: int) -> None:
    found = plan(batch_size=2, num_speculative_tokens=drafts)
    assert found.geometry.decode_queries == (1, drafts + 1)
    assert {"decode_b2_q1", f"decode_b2_q{drafts + 1}"} <= set(found.geometry.table.names)
    recorded = RecordedConfig.of(found, "m", "float32")
    assert recorded.num_speculative_tokens == drafts
    assert recorded.geometry == found.geometry
    assert f"--num-speculative-tokens {drafts}" in recorded.compile_command("d")


def test_drafts_have_limits() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens 129: a step verifies at most 128"):
        plan(num_speculative_tokens=129)
    assert plan(max_seq_len=65, num_speculative_tokens=64).geometry.decode_queries == (1, 65)
    with pytest.raises(ValueError, match="num_speculative_tokens 64 is no less than max_seq_len"):
        plan(max_seq_len=64, num_speculative_tokens=64)


def test_programs_take_embeddings_where_that_is_wanted() -> None:
    found = plan(use_inputs_embeds=True)
    assert found.geometry.takes_embeds
    assert {"embed_b1_q1", "embed_b256_q1"} <= set(found.geometry.table.names)
    recorded = RecordedConfig.of(found, "m", "float32")
    assert recorded.geometry == found.geometry
    assert recorded.compile_command("d").endswith("--use-inputs-embeds")
    with pytest.raises(ValueError, match="not supported together with num_speculative_tokens"):
        plan(use_inputs_embeds=True, num_speculative_tokens=1)
    with pytest.raises(ValueError, match="not supported together with lora_config yet: leave one"):
        plan(use_inputs_embeds=True, lora_config=ADAPTERS)
    plain = RecordedConfig.of(plan(), "m", "float32")
    assert not plain.geometry.takes_embeds
    assert "--use-inputs-embeds" not in plain.compile_command("d")


class TestPooling:
    @pytest.mark.parametrize(
        ("longest", "tokens"), [(1, 1024), (1024, 1024), (1025, 1088), (2000, 2048)]
    )
    def test_an_encoders_step_holds_the_longest_text(self, longest: int, tokens: int) -> None:
        found = pooling_plan("BertModel", positions=longest)
        assert found.chunk == tokens
        assert found.geometry.pooling is not None
        assert found.geometry.pooling.step_tokens == tokens
        assert found.geometry.max_model_len == longest

    @pytest.mark.parametrize(
        ("name", "longest_text", "most"),
        [
            ("BertModel", None, 514),
            ("BertModel", 256, 256),
            ("RobertaModel", None, 512),
            ("XLMRobertaForSequenceClassification", 10**30, 512),
            ("Qwen3Model", 128, 128),
        ],
    )
    def test_the_longest_text(self, name: str, longest_text: int | None, most: int) -> None:
        """RoBERTa's table begins with rows for padding; the tokenizer may know a lower limit."""
        assert pooling_plan(name, longest_text).geometry.max_model_len == most
        with pytest.raises(ValueError, match=f"{most + 1} is longer than the {most} positions"):
            pooling_plan(name, longest_text, max_seq_len=most + 1)

    @pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
    def test_what_is_recorded_gives_the_same_programs(self, name: str) -> None:
        found = pooling_plan(name, batch_size=4, decoder_batch_sizes=[1], max_seq_len=100)
        recorded = RecordedConfig.of(found, "m", "float32")
        assert recorded.geometry == found.geometry
        assert recorded.runner == "pooling"
        assert "encoder_b4_q100" in recorded.geometry.table.names
        assert ("head_b4_q1" in recorded.geometry.table.names) is ("For" in name)
        again = RecordedConfig.from_json(recorded.to_json())
        assert again == recorded
        assert "--kvcache-block-size" not in recorded.compile_command("d")
        assert recorded.compile_command("d").endswith("--runner pooling")

    def test_a_decoder_that_pools_has_chunks_and_no_logits(self) -> None:
        names = pooling_plan("Qwen3ForSequenceClassification").geometry.table.names
        assert names == ("prefill_b1_q256", "decode_b1_q1", "head_b1_q1")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"kvcache_block_size": 64}, "BertModel is an encoder and keeps no KV: leave out kvc"),
            ({"attn_impl": "eager"}, "keeps no KV: leave out attn_impl"),
            ({"use_inputs_embeds": True}, "BertModel generates no text: leave out use_inputs"),
            ({"num_speculative_tokens": 2}, "generates no text: leave out num_speculative"),
            ({"lora_config": ADAPTERS}, "generates no text: leave out lora_config"),
            ({"prefill_chunk_size": 448}, "448 is smaller than max_seq_len 514: an encoder comp"),
            ({"batch_size": 2048, "prefill_chunk_size": 1024}, "1024 is smaller than batch_size"),
            ({"decoder_batch_sizes": [2]}, "[2] are larger than the batch size 1"),
        ],
    )
    def test_what_an_encoder_cannot_have(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            pooling_plan("BertModel", **options)
