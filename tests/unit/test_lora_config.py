# SPDX-License-Identifier: Apache-2.0
"""Adapters that are compiled in: what a configuration may say."""

import json
from pathlib import Path
from typing import Any

import pytest

from rbln_vllm.lora.config import AdapterConfig, LoraConfig


def entry(number: int = 1, **changes: Any) -> dict[str, Any]:
    fields = {"lora_int_id": number, "lora_name": f"a{number}", "lora_path": f"/a{number}"}
    return {**fields, **changes}


def adapter_dir(root: Path, **settings: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "adapter_config.json").write_text(json.dumps(settings))
    return root


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_int_id": 0}, "base model"),
        ({"lora_int_id": -1}, "1 or more"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_path": ""}, "lora_path"),
        ({"r": 0}, "r 0 must be"),
        ({"rank": 4}, "rank is unknown"),
    ],
)
def test_adapters_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterConfig.of(entry(**changes))


def test_a_bias_is_not_built() -> None:
    with pytest.raises(NotImplementedError, match="bias"):
        AdapterConfig.of(entry(bias="all"))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="lacks lora_name, lora_path"):
        AdapterConfig.of({"lora_int_id": 1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no adapters"),
        ({"adapters": []}, "no adapters"),
        ({"adapters": [entry(2)]}, r"contiguous from 1, not \[2\]"),
        ({"adapters": [entry(1), entry(3)]}, "contiguous"),
        ({"adapters": [entry(1), entry(1)]}, "unique"),
        ({"adapters": [entry(1), entry(2, lora_name="a1")]}, "lora_name must be unique"),
        ({"adapters": [entry(1)], "max_lora_rank": 0}, "max_lora_rank 0"),
        ({"adapters": [entry(1)], "max_loras": 1}, "max_loras is unknown"),
    ],
)
def test_configurations_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig.of(config)


def test_what_is_not_given_comes_from_the_adapter(tmp_path: Path) -> None:
    full = adapter_dir(
        tmp_path / "full", r=4, lora_alpha=2, target_modules=["q_proj"], use_rslora=True
    )
    bare = adapter_dir(tmp_path / "bare")
    entries = [entry(2, lora_path=str(bare)), entry(1, lora_path=str(full), lora_alpha=6.0)]
    found = LoraConfig.of({"adapters": entries}).resolved()
    one, two = found.adapters
    assert (one.lora_int_id, one.r, one.lora_alpha) == (1, 4, 6.0)
    assert (one.target_modules, one.bias, one.use_rslora) == (("q_proj",), "none", True)
    assert (two.r, two.lora_alpha, two.bias, two.use_rslora) == (8, 8.0, "none", False)
    assert found.max_lora_rank == 8
    assert found.ids == {1, 2}
    assert LoraConfig.of(found.to_json()) == found


def test_a_rank_that_is_too_small(tmp_path: Path) -> None:
    directory = adapter_dir(tmp_path / "a", r=9)
    config = {"adapters": [entry(lora_path=str(directory))], "max_lora_rank": 8}
    with pytest.raises(ValueError, match="below the largest rank 9"):
        LoraConfig.of(config).resolved()


def test_a_bias_of_the_adapter_itself(tmp_path: Path) -> None:
    directory = adapter_dir(tmp_path / "a", bias="lora_only")
    with pytest.raises(NotImplementedError, match="lora_only"):
        AdapterConfig.of(entry(lora_path=str(directory))).resolved()


def test_paths(tmp_path: Path) -> None:
    directory = adapter_dir(tmp_path / "a", r=4)
    hub = AdapterConfig.of(entry(lora_path="org/adapter"))
    assert hub.resolved(lambda name: str(directory)).lora_path == str(directory)
    with pytest.raises(ValueError, match="is no directory"):
        hub.resolved()
    (directory / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        AdapterConfig.of(entry(lora_path=str(directory))).resolved()
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        AdapterConfig.of(entry(lora_path=str(directory))).resolved()
