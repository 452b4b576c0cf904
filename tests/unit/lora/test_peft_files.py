# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT saves them, read to be compiled in."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rbln_vllm.lora.config import RBLNLoRAAdapterConfig, RBLNLoRAConfig
from rbln_vllm.lora.fit import AdapterError
from rbln_vllm.lora.peft_files import PeftAdapter, check_settings, read_adapters
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.toolchain import AdaptedModule

MODULES = (
    AdaptedModule("layers.0.q_proj", "layers.0.q_proj.weight", 8, 20),
    AdaptedModule("layers.0.o_proj", "layers.0.o_proj.weight", 20, 8),
)
RANK, MOST = 4, 6
ADAPTERS = AdapterShape(1, MOST, torch.bfloat16).adapters(MODULES)
Q = "base_model.model.layers.0.q_proj"


def tensors(rank: int = RANK) -> dict[str, Tensor]:
    found = {}
    for module in MODULES:
        key = f"base_model.model.{module.name}"
        found[f"{key}.lora_A.weight"] = torch.randn(rank, module.in_features)
        found[f"{key}.lora_B.weight"] = torch.randn(module.out_features, rank)
    return found


def saved(directory: Path, weights: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "bias": "none", **settings}
    (directory / "adapter_config.json").write_text(json.dumps(plain))
    save_file(tensors() if weights is None else weights, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, **given: Any) -> PeftAdapter:
    return PeftAdapter.of(RBLNLoRAAdapterConfig(1, "mine", str(directory), **given))


def scale_of(adapter: PeftAdapter, directory: Path, module: str = "layers.0.q_proj") -> Tensor:
    """What B was multiplied with."""
    part = adapter.parts(ADAPTERS)[module]
    stored = load_file(directory / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
    assert torch.equal(part.a_RK, a.bfloat16())
    assert part.scale == 1.0
    factors = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0, 6.0]).unbind()
    return next(f for f in factors if torch.equal((b * f).bfloat16(), part.b_OR))


@pytest.mark.parametrize(
    ("settings", "given", "scale"),
    [
        ({}, {}, 0.5),
        ({}, {"lora_alpha": 8.0}, 2.0),
        ({}, {"r": RANK}, 0.5),
        ({"use_rslora": True}, {}, 1.0),
        ({"use_rslora": True}, {"use_rslora": False}, 0.5),
        ({"lora_alpha": 1.0, "alpha_pattern": {"q_proj": 12}}, {}, 3.0),
        ({"alpha_pattern": {"proj": 12}}, {}, 0.5),
        ({"alpha_pattern": {r"layers\.\d\.q_proj": 4, "q_proj": 8}}, {}, 1.0),
        ({"lora_alpha": None}, {}, 2.0),
    ],
    ids=str,
)
def test_the_scale_is_peft_s(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any], scale: float
) -> None:
    directory = saved(tmp_path, **settings)
    assert scale_of(read(directory, **given), directory) == scale


def test_one_module_of_another_rank(tmp_path: Path) -> None:
    weights = tensors()
    weights[f"{Q}.lora_A.weight"] = torch.randn(MOST, 8)
    weights[f"{Q}.lora_B.weight"] = torch.randn(20, MOST)
    directory = saved(tmp_path, weights, lora_alpha=12, rank_pattern={"q_proj": MOST})
    adapter = read(directory)
    assert adapter.largest_rank == MOST
    assert scale_of(adapter, directory) == 2.0
    assert scale_of(adapter, directory, "layers.0.o_proj") == 3.0


def test_what_is_not_given_comes_from_the_adapter(tmp_path: Path) -> None:
    directory = saved(tmp_path, target_modules=["q_proj", "o_proj"], use_rslora=True)
    config = read(directory, target_modules=("q_proj", "o_proj")).config
    assert (config.r, config.lora_alpha, config.bias, config.use_rslora) == (4, 2, "none", True)
    found = read(directory).config
    assert found.target_modules == ("o_proj", "q_proj")
    (directory / "adapter_config.json").write_text("{}")
    found = read(directory).config
    assert (found.r, found.lora_alpha, found.bias, found.use_rslora) == (8, 8.0, "none", False)


def test_names_without_peft_s_prefix(tmp_path: Path) -> None:
    weights = {k.removeprefix("base_model.model."): t for k, t in tensors().items()}
    weights["model.embed_tokens.base_layer.weight"] = torch.zeros(3, 2)
    assert set(read(saved(tmp_path, weights)).parts(ADAPTERS)) == {m.name for m in MODULES}


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "LOHA"}, "PEFT's type LOHA"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 0}, r"r 0 must be 1 or more \(in its adapter_config.json\)"),
        ({"r": "4"}, "r '4' must be"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"(": 1}}, "is no pattern"),
    ],
    ids=str,
)
def test_settings_that_programs_cannot(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read(saved(tmp_path, **settings))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.clear(), "has no LoRA weights"),
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "q_proj: lora_A or lora_B is missing"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 9)}), "for another model"),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(20, 3)}), "for another model"),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(20)}), "for another model"),
        (lambda t: t.update({f"{Q}.lora_B.bias": torch.zeros(20)}), "is no lora_A or lora_B"),
        (lambda t: t.update({"x.lora_embedding_A": torch.zeros(4, 4)}), "is no lora_A or lora_B"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 8, dtype=torch.int32)}),
            "torch.int32",
        ),
        (lambda t: t.update({"x.lora_A.weight": torch.zeros(4, 4)}), "changes x, which this model"),
        (lambda t: t[f"{Q}.lora_A.weight"].fill_(math.nan), "q_proj: its weights hold NaN"),
        (lambda t: t[f"{Q}.lora_B.weight"][-1, -1:].fill_(math.inf), "hold NaN or infinity"),
    ],
    ids=range(11),
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Change, words: str) -> None:
    weights = tensors()
    change(weights)
    with pytest.raises(AdapterError, match=words):
        read(saved(tmp_path, weights)).parts(ADAPTERS)


@pytest.mark.parametrize("rank", [MOST, MOST + 1])
def test_ranks_at_the_edge(tmp_path: Path, rank: int) -> None:
    adapter = read(saved(tmp_path, tensors(rank), r=rank))
    if rank == MOST:
        assert adapter.parts(ADAPTERS)
        return
    with pytest.raises(AdapterError, match=f"rank {rank} is above {MOST}: raise --max-lora-rank"):
        adapter.parts(ADAPTERS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": "4"}, "r '4' is no number"),
        ({"lora_alpha": [8]}, r"lora_alpha \[8\] is no number"),
        ({"lora_alpha": math.nan}, "lora_alpha nan is no number"),
        ({"peft_type": "IA3"}, "PEFT's type IA3"),
        ({"alpha_pattern": {"(": 1}}, "is no pattern"),
    ],
    ids=str,
)
def test_settings_are_checked_before_vllm_reads_them(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    check_settings("mine", saved(tmp_path))
    check_settings("mine", saved(tmp_path, r=None, lora_alpha=None))
    with pytest.raises(AdapterError, match=words):
        check_settings("mine", saved(tmp_path, **settings))


def test_weights_of_another_rank_than_the_settings(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="have rank 3, and its settings say 4"):
        read(saved(tmp_path, tensors(3))).parts(ADAPTERS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 5}, "r 5 is not what it was trained with, 4"),
        ({"target_modules": ("k_proj",)}, "target_modules"),
    ],
)
def test_what_the_weights_decide(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    directory = saved(tmp_path, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=words):
        read(directory, **given)


def test_a_bias_of_the_adapter_itself(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="lora_only"):
        read(saved(tmp_path, bias="lora_only"))


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"there is no directory .*/none"):
        read(tmp_path / "none")
    directory = saved(tmp_path)
    (directory / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json")
    with pytest.raises(AdapterError, match=r"cannot be read .* as safetensors"):
        read(directory).parts(ADAPTERS)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"cannot be read .* as safetensors"):
        read(directory).parts(ADAPTERS)
    for text, words in (("{", "is no JSON"), ("[]", "holds no settings"), ("\ud800", "no JSON")):
        file = directory / "adapter_config.json"
        file.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(AdapterError, match=words):
            read(directory)
    file.unlink()
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read: No such file"):
        read(directory)


def test_a_name_on_the_hub_is_fetched(tmp_path: Path) -> None:
    directory, asked = saved(tmp_path), []

    def download(name: str) -> Path:
        asked.append(name)
        return directory

    config = RBLNLoRAAdapterConfig(1, "mine", "org/adapter")
    found = PeftAdapter.of(config, download)
    assert (found.directory, found.config.lora_path, asked) == (
        directory,
        "org/adapter",
        ["org/adapter"],
    )


def test_the_rank_of_all(tmp_path: Path) -> None:
    paths = [saved(tmp_path / str(rank), tensors(rank), r=rank) for rank in (3, 5)]
    adapters = tuple(RBLNLoRAAdapterConfig(n, f"a{n}", str(p)) for n, p in enumerate(paths, 1))
    found, config = read_adapters(RBLNLoRAConfig(adapters))
    assert config.max_lora_rank == 5
    assert [adapter.config for adapter in found] == list(config.adapters)
    assert read_adapters(RBLNLoRAConfig(adapters, 16))[1].max_lora_rank == 16
    with pytest.raises(ValueError, match="max_lora_rank 4 is below the largest rank 5"):
        read_adapters(RBLNLoRAConfig(adapters, 4))
    assert math.isclose(found[0].config.lora_alpha or 0, 2)
