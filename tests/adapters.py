# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for tests, as PEFT stores them, and models with one merged in.

`W + scale * B @ A` is what PEFT's `merge_and_unload` makes of a model; its greedy text is the
oracle of what a server must say with the adapter.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Adapter:
    """An adapter of every linear whose name matches `targets`, of random content.

    `size` is how far it moves a layer's output, relative to what the layer computes: enough that
    other tokens win. `config` are further entries of adapter_config.json.
    """

    rank: int = 4
    alpha: float = 8.0
    targets: str = r".*(q|k|v|o|gate|up|down)_proj"
    seed: int = 0
    size: float = 0.7
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        root = self.config.get("use_rslora", False)
        return self.alpha / (math.sqrt(self.rank) if root else self.rank)

    def save(self, model_dir: Path, directory: Path) -> Path:
        """Write it below `directory` for the model; returns where."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, weight_OK in _linear_weights(model_dir):
            if re.fullmatch(self.targets, name):
                a_RK, b_OR = self._matrices(name, weight_OK)
                tensors[f"base_model.model.{name}.lora_A.weight"] = a_RK
                tensors[f"base_model.model.{name}.lora_B.weight"] = b_OR
        save_file(tensors, directory / "adapter_model.safetensors")
        self.write_config(directory)
        return directory

    def write_config(self, directory: Path) -> None:
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": self.targets,
            "bias": "none",
            **self.config,
        }
        (directory / "adapter_config.json").write_text(json.dumps(settings))

    def _matrices(self, name: str, weight_OK: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 7919 + sum(name.encode()))
        a_RK = torch.randn(self.rank, weight_OK.shape[1], generator=generator)
        b_OR = torch.randn(weight_OK.shape[0], self.rank, generator=generator)
        spread = float(weight_OK.float().std()) * self.size / (math.sqrt(self.rank) * self.scale)
        # Numbers that bf16 has too: then only what is computed with them differs.
        return a_RK.bfloat16().float(), (b_OR * spread).bfloat16().float()


def merged_model(model_dir: Path, adapter_dir: Path, target: Path, scale: float) -> Path:
    """A copy of the model with the adapter's products added to its weights, in fp32."""
    if target.exists():
        return target
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    with torch.no_grad():
        for key, a_RK in tensors.items():
            if ".lora_A." not in key:
                continue
            b_OR = tensors[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            module = model.get_submodule(name)
            delta_OK = scale * b_OR.float() @ a_RK.float()
            module.weight += delta_OK.t() if isinstance(module, Conv1D) else delta_OK
    model.save_pretrained(target)
    for file in model_dir.glob("*token*"):
        shutil.copy(file, target)
    return target


def change_weights(
    adapter_dir: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Rewrite an adapter's weights in place."""
    file = adapter_dir / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def _linear_weights(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Names of the model's linears and their weights `[O, K]`, without the head."""
    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    head = shape.get_output_embeddings()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    names = [
        name
        for name, module in shape.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    ]
    for name in names:
        module = model.get_submodule(name)
        weight = module.weight.detach()
        yield name, weight.t() if isinstance(module, Conv1D) else weight
