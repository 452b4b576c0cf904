# SPDX-License-Identifier: Apache-2.0
"""`rbln-vllm compile` and `rbln-vllm inspect`: arguments, dry runs, what is printed and refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig

from rbln_vllm.cli.main import main
from rbln_vllm.optimum.compiling import CompileJob
from rbln_vllm.optimum.directory import CompiledDirectory
from rbln_vllm.optimum.plan import plan_compile
from tests.unit.optimum.test_directory import COMMAND, compiled

__all__ = ["compiled"]  # a fixture


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama without weights: a dry run needs none."""
    directory = tmp_path / "llama"
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=65_536,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(directory)
    return directory


def dry_run(model: Path, *arguments: str, npu: str = "RBLN-CR03") -> int:
    return main(["compile", str(model), "--target", npu, *arguments])


def test_a_dry_run_shows_programs_and_memory(model: Path, capsys: Any) -> None:
    code = dry_run(model, "--json", "--batch-size", "2", "--decoder-batch-sizes", "1,2")
    assert code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rbln_config"] | {"source": "", "prefill_chunk_size": 512} == {
        "cls_name": "RBLNLlamaForCausalLM",
        "source": "",
        "dtype": "bfloat16",
        "npu": "RBLN-CR03",
        "attn_impl": "flash_attn",
        "batch_size": 2,
        "max_seq_len": 65_536,
        "prefill_chunk_size": 512,
        "kvcache_block_size": 8_192,
        "decoder_batch_sizes": [2, 1],
        "num_devices": 1,
        "num_speculative_tokens": 0,
        "use_inputs_embeds": False,
    }
    assert {"prefill_b1_q512", "decode_b1_q1", "decode_b2_q1"} <= set(facts["programs"])
    assert facts["refusals"] == []
    memory = facts["memory"]
    assert memory["kv_block"] == 2 * 2 * 8_192 * 2 * 32 * 2  # layers, heads, tokens, K and V, bytes
    assert memory["blocks_wanted"] == 17
    # 140 of 144 GiB at 0.93, less weights and 256 MiB on each die for each program; two heads
    # on four dies are there twice.
    programs = len(facts["programs"]) * 4 * (256 << 20)
    budget = int((140 << 30) * 0.93) - memory["weights"] - programs
    assert memory["blocks"] == budget // 2 // memory["kv_block"]
    assert memory["weights"] % (2 << 20) == 0
    assert list(model.iterdir()) == [model / "config.json"]


def test_a_dry_run_as_text(model: Path, capsys: Any) -> None:
    assert dry_run(model) == 0
    text = capsys.readouterr().out
    assert re.search(r"^npu +RBLN-CR03$", text, re.M)
    assert "prefill_b1_q512" in text
    assert text.endswith("Nothing is refused.\n")


@pytest.mark.parametrize(
    ("npu", "arguments", "words"),
    [
        ("RBLN-CR03", ["--attn-impl", "eager"], "65536 tokens in one block is longer than 16384"),
        ("RBLN-CR03", ["--kvcache-partition-len", "512"], "512 is not from 1024 to 16384"),
        ("RBLN-CR03", ["--max-model-len", "20000", "--block-size", "8192"], "must be a multiple"),
        ("RBLN-CA25", ["--prefill-chunk-size", "100"], "must be a positive multiple of 64"),
        ("RBLN-XX", [], "unknown device 'RBLN-XX' in --target"),
    ],
)
def test_a_dry_run_says_what_the_device_refuses(
    model: Path, capsys: Any, npu: str, arguments: list[str], words: str
) -> None:
    assert dry_run(model, *arguments, npu=npu) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("npu", "window", "refused"),
    [
        ("RBLN-CA25", 32_768 - 128, False),
        ("RBLN-CA25", 32_768 - 127, True),
        ("RBLN-CR03", 32_767 - 512, False),
        ("RBLN-CR03", 32_767 - 511, True),
        ("HOST", 60_000, False),
    ],
)
def test_a_window_must_fit_beside_a_chunk(
    model: Path, capsys: Any, npu: str, window: int, refused: bool
) -> None:
    config = json.loads((model / "config.json").read_text())
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps({**config, **mistral, "sliding_window": window}))
    assert dry_run(model, npu=npu) == (2 if refused else 0)
    words = f"a sliding window of {window} tokens is longer than"
    assert (words in capsys.readouterr().err) is refused
    if refused:
        assert main(["compile", str(model), "-o", str(model.parent / "x"), "--npu", npu]) == 2
        assert words in capsys.readouterr().err
        assert not (model.parent / "x").exists()


def test_a_pool_that_is_too_small_is_refused(model: Path, capsys: Any) -> None:
    """Weights and KV of a model as large as this do not fit 16 GiB."""
    config = json.loads((model / "config.json").read_text())
    large = {"hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48}
    (model / "config.json").write_text(json.dumps(config | large))
    assert dry_run(model, npu="RBLN-CA25") == 2
    output = capsys.readouterr()
    assert "REFUSED: Insufficient DRAM on RBLN-CA25" in output.out
    assert "RBLN-CA25 refuses this: Insufficient DRAM" in output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: MODEL"),
        (["m"], "--output DIR says where to put"),
        (["m", "-o", "d", "--batch-size", "x"], "invalid int value: 'x'"),
        (["m", "-o", "d", "--decoder-batch-sizes", "1,x"], "is not a list like 1,2,4"),
        (["m", "-o", "d", "--attn-impl", "sdpa"], "invalid choice: 'sdpa'"),
        (["m", "-o", "d", "--lora-modules"], "expected at least one argument"),
        (["m", "-o", "d", "--lora-modules", "a=x", "=y"], "--lora-modules =y: write NAME=PATH"),
        (["m", "-o", "d", "--max-lora-rank", "8"], "--max-lora-rank is of --lora-modules"),
        (["m", "-o", "d", "--runner", "draft"], "invalid choice: 'draft'"),
        (["m", "-o", "d", "--hf-overrides", "{"], "'{' is not JSON"),
        (["m", "-o", "d", "--hf-overrides", "[]"], "'[]' is not a JSON object"),
    ],
)
def test_wrong_arguments_are_one_line(capsys: Any, arguments: list[str], words: str) -> None:
    assert main(["compile", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rbln-vllm: compile: ")
    assert words in error
    assert error.count("\n") == 1


def test_an_output_with_other_files_is_refused(model: Path, capsys: Any) -> None:
    assert main(["compile", str(model), "-o", str(model)]) == 2
    assert "is the model itself" in capsys.readouterr().err
    (model.parent / "full").mkdir()
    (model.parent / "full" / "thesis.tex").touch()
    assert main(["compile", str(model), "-o", str(model.parent / "full")]) == 2
    assert "holds no compiled model" in capsys.readouterr().err


def test_a_compiled_model_is_not_compiled_again(compiled: Path, capsys: Any) -> None:
    assert main(["compile", str(compiled), "-o", str(compiled / "new")]) == 2
    assert "is a compiled model, which has no weights" in capsys.readouterr().err


def test_every_flag_reaches_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[CompileJob] = []
    monkeypatch.setattr("rbln_vllm.cli.compile._compile", lambda job, *_: jobs.append(job))
    flags = ["--max-num-seqs", "4", "--max-model-len", "1024", "--max-num-batched-tokens", "128"]
    flags += ["--block-size", "64", "--decoder-batch-sizes", "1", "--dtype", "float32"]
    assert main(["compile", str(model), "-o", "x", *flags]) == 0
    recorded = jobs[0].recorded
    assert (recorded.batch_size, recorded.max_seq_len, recorded.prefill_chunk_size) == (
        4,
        1024,
        128,
    )
    assert (recorded.kvcache_block_size, recorded.decoder_batch_sizes) == (64, (4, 1))
    assert (recorded.dtype, recorded.npu) == ("float32", "HOST")


def test_the_command_line_is_for_serving(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch size is the device's, that of the API 1."""
    jobs: list[CompileJob] = []
    monkeypatch.setattr("rbln_vllm.cli.compile._compile", lambda job, *_: jobs.append(job))
    assert main(["compile", str(model), "-o", "x"]) == 0
    assert jobs[0].recorded.batch_size == 16
    from rbln_vllm.optimum import RBLNModelConfig

    plan = plan_compile(jobs[0].source.config, RBLNModelConfig(), jobs[0].plan.architecture)
    assert plan.geometry.max_num_seqs == 1


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A BERT without weights."""
    directory = tmp_path / "bert"
    BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
        max_position_embeddings=128,
        architectures=["BertModel"],
        dtype="float16",
    ).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("npu", ["HOST", "RBLN-CA25"])
def test_a_dry_run_of_an_encoder(encoder: Path, capsys: Any, npu: str) -> None:
    """It keeps no KV and is computed in fp32 unless told otherwise."""
    assert dry_run(encoder, "--json", npu=npu) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rbln_config"]["cls_name"] == "RBLNBertModel"
    assert facts["rbln_config"]["dtype"] == "float32"
    assert "encoder_b1_q128" in facts["programs"]
    assert facts["memory"]["kv_block"] == facts["memory"]["blocks_wanted"] == 0
    assert facts["memory"]["blocks"] is None


def test_overrides_of_the_configuration_may_add_fields(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    jobs: list[CompileJob] = []
    monkeypatch.setattr("rbln_vllm.cli.compile._compile", lambda job, *_: jobs.append(job))
    overrides = json.dumps({"num_hidden_layers": 1, "added": True})
    assert main(["compile", str(model), "-o", "x", "--hf-overrides", overrides]) == 0
    config = jobs[0].source.config
    assert (config.num_hidden_layers, config.added) == (1, True)
    half = json.dumps({"is_original_qwen3_reranker": True})
    assert main(["compile", str(model), "-o", "x", "--hf-overrides", half]) == 2
    assert "--hf-overrides lack classifier_from_token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-speculative-tokens", "3"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
    ],
)
def test_drafts(model: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    jobs: list[CompileJob] = []
    monkeypatch.setattr("rbln_vllm.cli.compile._compile", lambda job, *_: jobs.append(job))
    assert main(["compile", str(model), "-o", "x", *flags]) == 0
    assert main(["compile", str(model), "-o", "x", "--use-inputs-embeds"]) == 0
    found = [(j.recorded.num_speculative_tokens, j.recorded.use_inputs_embeds) for j in jobs]
    assert found == [(3, False), (0, True)]


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "'eagle3') cannot be compiled ahead"),
        ('{"num_speculative_tokens": 3}', "drafters that are models (None) cannot be compiled"),
        ('{"method": "suffix"}', "num_speculative_tokens None is not a positive number"),
        ('{"method": "ngram", "num_speculative_tokens": 129}', "verifies at most 128 drafts"),
    ],
)
def test_drafts_that_cannot_be(model: Path, capsys: Any, speculation: str, words: str) -> None:
    assert main(["compile", str(model), "-o", "x", "--speculative-config", speculation]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_only_generates_does_not_pool(model: Path, capsys: Any) -> None:
    assert main(["compile", str(model), "-o", "x", "--runner", "pooling"]) == 2
    error = capsys.readouterr().err
    assert "LlamaForCausalLM is not built for classify or embed or score or token_embed" in error
    assert "BertModel" in error


class TestInspect:
    def test_as_json(self, compiled: Path, capsys: Any) -> None:
        assert main(["inspect", str(compiled), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["rbln_config"]["cls_name"] == "RBLNLlamaForCausalLM"
        assert facts["compile_command"] == COMMAND.format(compiled)
        assert facts["programs"]["decode_b1_q1"]["commands"] == 1
        assert facts["memory"]["kv_block"] == 2 * 32 * 64 * 4
        assert facts["memory"]["kv_all_sequences"] == 4 * 8 * facts["memory"]["kv_block"]
        assert facts["size"] == sum(
            file.stat().st_size
            for file in compiled.rglob("*")
            if file.is_file() and file.name != "rbln_config.json"
        )

    def test_as_text(self, compiled: Path, capsys: Any) -> None:
        assert main(["inspect", str(compiled), "--verify"]) == 0
        text = capsys.readouterr().out
        assert re.search(r"^batch_size +4$", text, re.M)
        assert "memory kv_block" in text
        assert "decode_b1_q1" in text

    def test_what_cannot_be_served(self, compiled: Path, capsys: Any) -> None:
        (compiled / "programs" / "decode_b1_q1.json").write_text("{}")
        assert main(["inspect", str(compiled), "--verify"]) == 1
        assert "truncated or altered: compile it anew with" in capsys.readouterr().err
        assert main(["inspect", str(compiled / "programs")]) == 1
        assert "holds no model that this version compiled" in capsys.readouterr().err


def test_read_finds_the_command(compiled: Path) -> None:
    """The printed command is one that `compile` takes."""
    from rbln_vllm.cli.compile import _parser
    from rbln_vllm.toolchain import host_toolchain

    command = CompiledDirectory.read(compiled, host_toolchain()).compile_command.split()
    options = _parser().parse_args(command[2:])
    assert (options.model, options.output, options.batch_size) == ("org/model", str(compiled), 4)
    assert list(options.decoder_batch_sizes) == [4, 1]
