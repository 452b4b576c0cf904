# SPDX-License-Identifier: Apache-2.0
"""The transformers implementation: every architecture of the registry equals Hugging Face eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm import LLM, RequestOutput

from rbln_vllm.models.architectures import Task, built
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.toolchain import host_toolchain
from scripts.architecture_table import FORWARD, PAGE, measured_cells, share_of
from tests.engine.bf16_rule import check_bf16
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    all_tokens,
    generate,
    greedy,
    prompt,
    report,
    runner_of,
    running_engine,
)
from tests.oracle import hf_greedy, load_model

LENGTHS = (1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 200)
SCORED = CHUNK + 9
OPTIONS: Mapping[str, Any] = {
    "model_impl": "transformers",
    "additional_config": {"optimum_overrides": {"decoder_batch_sizes": [1]}},
}


@dataclass(frozen=True)
class Case:
    """`windows` are those of its layers, 0 for full attention; `overrides` change its config."""

    name: str
    windows: tuple[int, ...] = (0, 0)
    overrides: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, filter(None, self.windows))])


CASES = (
    Case("LlamaForCausalLM", overrides={"tie_word_embeddings": True}),
    Case("MistralForCausalLM", (48, 48), {"sliding_window": 48}),
    Case("MistralForCausalLM", (BLOCK, BLOCK), {"sliding_window": BLOCK}),
    Case("Qwen2ForCausalLM"),
    Case("Qwen3ForCausalLM"),
    Case("GemmaForCausalLM"),
    Case("Gemma2ForCausalLM", (64, 0)),
    Case("ExaoneForCausalLM"),
    Case("Exaone4ForCausalLM", (48, 0)),
    Case("Qwen3MoeForCausalLM"),
    Case("GptOssForCausalLM", (48, 0)),
    Case("PhiForCausalLM"),
    Case("OPTForCausalLM"),
    Case("GPT2LMHeadModel"),
)


def test_every_architecture_has_a_case() -> None:
    assert {case.name for case in CASES} == set(built(Task.GENERATE))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_hugging_face(tiny_model_dir: Callable[..., Path], case: Case) -> None:
    """Tokens over chunk, block and window edges, scores, and nothing left to torch."""
    directory = tiny_model_dir(case.name, **case.overrides)
    prompts = [prompt(length, seed=5) for length in LENGTHS]
    expected = [item.token_ids for item in hf_greedy(directory, prompts, 24, ignore_eos=True)]
    with running_engine(directory, **OPTIONS) as llm:
        store = runner_of(llm)._store
        assert tuple(layer.window for layer in store.kv_layers) == case.windows
        cold = all_tokens(generate(llm, prompts, greedy(24)))
        warm = all_tokens(generate(llm, prompts, greedy(24)))  # now with prefix hits
        (scored,) = generate(llm, [prompt(SCORED)], greedy(1, prompt_logprobs=20))
        assert report(llm)["compiled_after_ready"] == 0
        check_native(llm)
        check_page(llm, case.name, "transformers")
    assert cold == expected
    assert warm == expected
    check_scores(directory, scored)


def check_native(llm: LLM) -> None:
    """All matrix products and attention run on our kernels."""
    artifact = runner_of(llm)._store._artifact
    assert artifact is not None
    reports = host_toolchain().explain(artifact)
    assert any(report.attention_flops for report in reports.values())
    for name, found in reports.items():
        assert found.flops or name.startswith(("sampler", "draw", "mask")), name
        assert found.native_flops == found.flops, name
        assert "rbln::paged_attention" not in {item.operator for item in found.fallbacks}, name


def check_page(llm: LLM, name: str, implementation: str) -> None:
    """docs/architectures.md says how much of these programs is native."""
    artifact = runner_of(llm)._store._artifact
    assert artifact is not None
    reports = host_toolchain().explain(artifact).items()
    found = share_of([report for key, report in reports if key.startswith(FORWARD)])
    assert measured_cells(PAGE.read_text())[name, implementation] == found.text()


@torch.inference_mode()
def check_scores(directory: Path, output: RequestOutput) -> None:
    """Log-probabilities within 1e-4 of the logits' size."""
    tokens, places = list(output.prompt_token_ids or ()), output.prompt_logprobs
    assert places is not None
    logits = load_model(directory, torch.float32)(torch.tensor([tokens])).logits[0].float()
    expected, tolerance = torch.log_softmax(logits, dim=-1), 1e-4 * float(logits.abs().max())
    for position, scores in enumerate(places[1:]):
        assert scores is not None
        ours = torch.tensor([score.logprob for score in scores.values()])
        theirs = expected[position, list(scores)]
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance, msg=f"{position}")


def test_bf16_obeys_the_rule(tiny_llama_dir: Path) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    with running_engine(tiny_llama_dir, dtype="bfloat16", **OPTIONS) as llm:
        outputs = generate(llm, prompts, greedy(40, logprobs=1))
    check_bf16(tiny_llama_dir, outputs, hf_greedy(tiny_llama_dir, prompts, 40, ignore_eos=True))


def test_a_warm_start_builds_no_model(tiny_llama_dir: Path) -> None:
    with running_engine(tiny_llama_dir, **OPTIONS) as llm:
        cold = all_tokens(generate(llm, [prompt(CHUNK + 1)], greedy(8)))
    with (
        patch.object(ModelSource, "load", side_effect=AssertionError("the weights were loaded")),
        patch.object(ModelSource, "shape", side_effect=AssertionError("the module was built")),
        running_engine(tiny_llama_dir, **OPTIONS) as llm,
    ):
        assert all_tokens(generate(llm, [prompt(CHUNK + 1)], greedy(8))) == cold


def test_dummy_weights_need_no_checkpoint(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for file in tiny_llama_dir.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    with running_engine(tmp_path, load_format="dummy", **OPTIONS) as llm:
        (tokens,) = all_tokens(generate(llm, [prompt(9)], greedy(4)))
    assert len(tokens) == 4
