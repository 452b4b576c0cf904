# SPDX-License-Identifier: Apache-2.0
"""A compiled directory serves by itself: no original weights, no Hugging Face modules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from vllm.engine.arg_utils import EngineArgs

from rbln_vllm.cli.main import main
from rbln_vllm.geometry import geometry_of
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    SEQS,
    all_tokens,
    environment,
    generate,
    greedy,
    prompt,
    recorded_steps,
    report,
    runner_of,
    running_engine,
)
from tests.oracle import hf_greedy, load_model

LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 200)
PROMPTS = [prompt(length, seed=9) for length in LENGTHS]
SIZES = (
    *("--max-seq-len", str(MAX_LEN), "--batch-size", str(SEQS), "--decoder-batch-sizes", "1"),
    *("--prefill-chunk-size", str(CHUNK), "--kvcache-block-size", str(BLOCK)),
)
# What the directory decides is not asked for.
UNSAID: dict[str, Any] = {
    "model_impl": "auto",
    "dtype": "auto",
    "block_size": None,
    "max_num_batched_tokens": None,
    "max_model_len": None,
    "max_num_seqs": None,
}


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[list[int]]:
    return [item.token_ids for item in hf_greedy(tiny_llama_dir, PROMPTS, 12, ignore_eos=True)]


@pytest.fixture(scope="module")
def compiled(
    tiny_llama_dir: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Compiled by two processes from an original that is gone."""
    root = tmp_path_factory.mktemp("compiled")
    original = shutil.copytree(tiny_llama_dir, root / "original")
    arguments = ["compile", str(original), "--output", str(root / "model"), *SIZES]
    assert main([*arguments, "--parallel", "2"]) == 0
    shutil.rmtree(original)
    return root / "model"


@pytest.fixture
def without_modules() -> Iterator[None]:
    """Building any module of Hugging Face's fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a Hugging Face module was asked for")

    auto = transformers.AutoModelForCausalLM
    with (
        patch.object(transformers.PreTrainedModel, "__init__", refuse),
        patch.object(auto, "from_pretrained", refuse),
        patch.object(auto, "from_config", refuse),
        environment(VLLM_DISABLE_COMPILE_CACHE="1"),
    ):
        yield


@pytest.mark.usefixtures("without_modules")
def test_serves_what_was_compiled(compiled: Path, expected: list[list[int]]) -> None:
    with running_engine(compiled, **{**UNSAID, "max_num_seqs": 8, "dtype": "bfloat16"}) as llm:
        config = llm.llm_engine.vllm_config
        assert str(config.model_config.dtype) == "torch.float32"
        assert config.scheduler_config.max_num_seqs == SEQS
        assert runner_of(llm)._store.executable.program_names == frozenset(
            runner_of(llm)._geometry.table.names
        )
        assert all_tokens(generate(llm, PROMPTS, greedy(12))) == expected
        assert report(llm)["compiled_after_ready"] == 0


def test_programs_are_all_there(compiled: Path, capsys: Any) -> None:
    """`rbln-vllm programs DIR` asks for no weights."""
    with environment(VLLM_ENABLE_V1_MULTIPROCESSING=None):
        assert main(["programs", str(compiled), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cache_entry"] == str(compiled)
    assert {program["cached"] for program in facts["programs"]} == {True}


@pytest.mark.parametrize(
    ("attention", "block", "mode"), [("eager", 256, "naive"), ("flash_attn", 128, "flash")]
)
def test_an_engine_attends_as_asked(
    tiny_llama_dir: Path, attention: str, block: int, mode: str
) -> None:
    geometry = geometry_of(engine_config(tiny_llama_dir, attention, 256))
    assert (geometry.block_size, geometry.attention_mode) == (block, mode)


def test_attention_over_several_blocks_needs_several(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="one of 128 tokens holds a sequence of 128"):
        engine_config(tiny_llama_dir, "flash_attn", 128)


def engine_config(model: Path, attention: str, length: int) -> Any:
    overrides = {"optimum_overrides": {"attn_impl": attention}}
    args = EngineArgs(str(model), max_model_len=length, additional_config=overrides)
    return args.create_engine_config()


def test_holds_what_a_server_reads(compiled: Path, tiny_llama_dir: Path) -> None:
    names = {file.name for file in compiled.iterdir()}
    assert {"rbln_config.json", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert {"programs", "weights"} <= names
    theirs = json.loads((tiny_llama_dir / "config.json").read_text())
    ours = json.loads((compiled / "config.json").read_text())
    assert ours["architectures"] == theirs["architectures"]


def spoil_version(directory: Path) -> None:
    file = directory / "rbln_config.json"
    document = json.loads(file.read_text())
    document["toolchain_version"] = "0.0.0"
    file.write_text(json.dumps(document))


def drop_program(directory: Path) -> None:
    file = directory / "rbln_config.json"
    document = json.loads(file.read_text())
    del document["programs"]["decode_b1_q1"]
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (spoil_version, {}, "was compiled by rbln_host 0.0.0, and this is rbln_host"),
        (drop_program, {}, "lacks 1 programs that this configuration runs: decode_b1_q1"),
        (None, {"max_num_batched_tokens": 128}, "128 is not the prefill chunk of the compiled"),
        (None, {"long_prefill_token_threshold": 32}, "lacks 2 programs .*: prefill_b1_q32, logits"),
        (None, {"model_impl": "vllm"}, "holds a compiled model of the transformers impl"),
    ],
)
def test_what_cannot_be_served_is_refused(
    compiled: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None] | None,
    arguments: dict[str, Any],
    words: str,
) -> None:
    directory = shutil.copytree(compiled, tmp_path / "copy")
    if spoil is not None:
        spoil(directory)
    with pytest.raises(ValueError, match=words), running_engine(directory, **UNSAID | arguments):
        pass


def test_a_damaged_directory_is_refused(compiled: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(compiled, tmp_path / "copy")
    weights = next((directory / "weights").iterdir())
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    words = "is truncated or altered: compile it anew with"
    with pytest.raises(ValueError, match=words), running_engine(directory, **UNSAID):
        pass


def test_compiling_again_replaces_it(compiled: Path, tiny_llama_dir: Path, capsys: Any) -> None:
    """In place, and with attention over one block for a sequence."""
    target = compiled.parent / "again"
    shutil.copytree(compiled, target)
    sizes = ["--max-seq-len", "128", "--attn-impl", "eager", "--batch-size", "1"]
    assert main(["compile", str(tiny_llama_dir), "-o", str(target), *sizes]) == 0
    assert "Serve it with: rbln-vllm serve" in capsys.readouterr().out
    assert sorted(file.name for file in target.parent.iterdir()) == ["again", "model"]
    with running_engine(target, **UNSAID) as llm:
        geometry = runner_of(llm)._geometry
        assert (geometry.attention_mode, geometry.num_blocks_per_seq) == ("naive", 1)
        found = all_tokens(generate(llm, [PROMPTS[1]], greedy(12)))
    assert found == [hf_greedy(tiny_llama_dir, [PROMPTS[1]], 12, ignore_eos=True)[0].token_ids]


NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def test_drafts_are_verified_by_what_was_compiled(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A pattern that a prompt repeats is drafted; without drafts the same directory serves too."""
    target = tmp_path / "model"
    more = ["--speculative-config", json.dumps(NGRAM)]
    assert main(["compile", str(tiny_llama_dir), "-o", str(target), *SIZES, *more]) == 0
    texts = [prompt(7, seed=2) * 5, prompt(CHUNK + 1, seed=3)]
    theirs = [item.token_ids for item in hf_greedy(tiny_llama_dir, texts, 24, ignore_eos=True)]
    with running_engine(target, **UNSAID, speculative_config=NGRAM) as llm:
        with recorded_steps(llm) as steps:
            assert all_tokens(generate(llm, texts, greedy(24))) == theirs
        assert any(step.forward.endswith("_q4") for step in steps)
        assert report(llm)["compiled_after_ready"] == 0
    with running_engine(target, **UNSAID) as llm:
        assert all_tokens(generate(llm, texts, greedy(4))) == [each[:4] for each in theirs]
    with (
        pytest.raises(ValueError, match="was compiled for 3 drafts, not for 2"),
        running_engine(target, **UNSAID, speculative_config={**NGRAM, "num_speculative_tokens": 2}),
    ):
        pass


def test_prompts_may_be_embeddings(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In chunks, beside prompts of tokens, and again from the prefix cache."""
    target = tmp_path / "model"
    arguments = ["compile", str(tiny_llama_dir), "-o", str(target), *SIZES, "--use-inputs-embeds"]
    assert main(arguments) == 0
    table_VE = load_model(tiny_llama_dir, torch.float32).get_input_embeddings().weight.detach()
    expected = hf_greedy(tiny_llama_dir, PROMPTS, 12, ignore_eos=True)
    mixed: list[Any] = [
        {"prompt_embeds": table_VE[tokens]} if place % 2 == 0 else {"prompt_token_ids": tokens}
        for place, tokens in enumerate(PROMPTS)
    ]
    with running_engine(target, **UNSAID, enable_prompt_embeds=True) as llm:
        for _ in range(2):
            outputs = llm.generate(mixed, greedy(12), use_tqdm=False)
            assert all_tokens(outputs) == [item.token_ids for item in expected]
        other = [{"prompt_embeds": table_VE[PROMPTS[-2]] + 0.5}]
        assert all_tokens(llm.generate(other, greedy(12), use_tqdm=False)) != [
            expected[-2].token_ids
        ]
        assert report(llm)["compiled_after_ready"] == 0
    with running_engine(target, **UNSAID) as llm:
        assert all_tokens(generate(llm, PROMPTS[:1], greedy(12))) == [expected[0].token_ids]
    by_name = {"model_impl": "transformers", "enable_prompt_embeds": True}
    with running_engine(tiny_llama_dir, **by_name) as llm:
        outputs = llm.generate(mixed[:3], greedy(12), use_tqdm=False)
        assert all_tokens(outputs) == [item.token_ids for item in expected[:3]]
