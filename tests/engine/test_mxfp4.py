# SPDX-License-Identifier: Apache-2.0
"""GptOss checkpoints in MXFP4: weights are exact, and serve like the values they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rbln_vllm.models.transformers.source import ModelSource
from tests.engine.engines import CHUNK, all_tokens, generate, greedy, prompt, running_engine
from tests.mxfp4 import decode, element, write_decoded, write_mxfp4

GPT_OSS = "GptOssForCausalLM"


def test_elements() -> None:
    """The table of the specification."""
    assert [element(code) for code in range(8)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [element(code) for code in range(9, 16)] == [-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_weights_are_exact(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Every code and scales over most of bfloat16's range, in the rows that experts compute."""
    write_mxfp4(tiny_model_dir(GPT_OSS), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith("_blocks")]:
        generator = torch.Generator().manual_seed(len(name))
        stored[name] = torch.randint(0, 256, stored[name].shape, generator=generator).byte()
        scales = torch.randint(10, 240, stored[f"{name[:-7]}_scales"].shape, generator=generator)
        stored[f"{name[:-7]}_scales"] = scales.byte()
    save_file(stored, file, {"format": "pt"})
    config = AutoConfig.from_pretrained(tmp_path)
    model = ModelSource(config, str(tmp_path), torch.bfloat16).load()
    for index, layer in enumerate(model.base_model.layers):
        prefix, experts = f"model.layers.{index}.mlp.experts", layer.mlp.experts

        def exact(name: str, prefix: str = prefix) -> torch.Tensor:
            return decode(stored[f"{prefix}.{name}_blocks"], stored[f"{prefix}.{name}_scales"])

        gate_up_EGH, half = exact("gate_up_proj"), experts.gate_up_EGH.shape[1] // 2
        assert torch.equal(experts.gate_up_EGH[:, :half].double(), gate_up_EGH[:, ::2])
        assert torch.equal(experts.gate_up_EGH[:, half:].double(), gate_up_EGH[:, 1::2])
        assert torch.equal(experts.down_EHI.double(), exact("down_proj"))
        assert experts.gate_up_EGH.dtype == torch.bfloat16


def test_serves_what_the_checkpoint_holds(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The same tokens as from a checkpoint of the decoded values; nothing is left to torch."""
    source, found = tiny_model_dir(GPT_OSS), []
    write_mxfp4(source, tmp_path / "mxfp4")
    write_decoded(source, tmp_path / "decoded")
    prompts = [prompt(length, seed=5) for length in (1, CHUNK + 1)]
    for name in ("mxfp4", "decoded"):
        arguments = {"dtype": "bfloat16", "model_impl": "transformers", "max_num_seqs": 1}
        with running_engine(tmp_path / name, **arguments) as llm:
            found.append(all_tokens(generate(llm, prompts, greedy(16))))
    assert found[0] == found[1]


def test_the_other_implementation_says_what_to_use(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    write_mxfp4(tiny_model_dir(GPT_OSS), tmp_path)
    with (
        pytest.raises(ValueError, match="--model-impl transformers"),
        running_engine(tmp_path, dtype="bfloat16", model_impl="vllm"),
    ):
        pass
