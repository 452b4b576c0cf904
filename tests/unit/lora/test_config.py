# SPDX-License-Identifier: Apache-2.0
"""Adapters that are compiled in: what a configuration may say."""

from typing import Any

import pytest

from rbln_vllm.lora.config import RBLNLoRAAdapterConfig, RBLNLoRAConfig


def entry(number: int = 1, **changes: Any) -> dict[str, Any]:
    fields = {"lora_int_id": number, "lora_name": f"a{number}", "lora_path": f"/a{number}"}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_int_id": 0}, "base model"),
        ({"lora_int_id": -1}, "1 or more"),
        ({"lora_int_id": True}, "1 or more"),
        ({"lora_int_id": "1"}, "1 or more"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "base"}, "base model"),
        ({"lora_name": 3}, "must be texts"),
        ({"lora_path": ""}, "lora_path"),
        ({"lora_path": None}, "must be texts"),
        ({"r": 0}, "r 0 must be"),
        ({"r": 2.0}, r"r 2\.0 must be"),
        ({"lora_alpha": "8"}, "lora_alpha '8' is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan is no number"),
        ({"use_rslora": "yes"}, "use_rslora 'yes' is not true or false"),
        ({"target_modules": {"q": 1}}, "target_modules"),
        ({"rank": 4}, "rank is unknown"),
    ],
)
def test_adapters_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RBLNLoRAAdapterConfig.of(entry(**changes))


def test_a_bias_is_not_supported() -> None:
    with pytest.raises(NotImplementedError, match="bias 'all' is not supported: train it with"):
        RBLNLoRAAdapterConfig.of(entry(bias="all"))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="lacks lora_name, lora_path"):
        RBLNLoRAAdapterConfig.of({"lora_int_id": 1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no adapters"),
        ({"adapters": []}, "no adapters"),
        ({"adapters": [entry(2)]}, r"contiguous from 1, not \[2\]"),
        ({"adapters": [entry(1), entry(3)]}, r"contiguous from 1, not \[1, 3\]"),
        ({"adapters": [entry(1), entry(1)]}, "unique"),
        ({"adapters": [entry(1), entry(2, lora_name="a1")]}, "lora_name must be unique"),
        ({"adapters": [entry(1)], "max_lora_rank": 0}, "max_lora_rank 0"),
        ({"adapters": [entry(1)], "max_lora_rank": "8"}, "max_lora_rank '8'"),
        ({"adapters": [entry(1)], "max_loras": 1}, "max_loras is unknown"),
        ({"adapters": entry(1)}, "must be a list"),
        ({"adapters": ["a"]}, "is no mapping"),
        ([entry(1)], "is no mapping"),
    ],
)
def test_configurations_that_cannot_be(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RBLNLoRAConfig.of(config)


def test_adapters_are_in_the_order_of_their_ids() -> None:
    second = RBLNLoRAAdapterConfig(2, "two", "/with space/2", r=4, target_modules=("q_proj",))
    config = RBLNLoRAConfig.of({"adapters": [second, entry(1)], "max_lora_rank": 8})
    assert config.names == ("a1", "two")
    assert RBLNLoRAConfig.of(config.to_json()) == config
    assert config.arguments == "--lora-modules a1=/a1 'two=/with space/2' --max-lora-rank 8"


def test_the_same_adapters_from_elsewhere() -> None:
    recorded = RBLNLoRAConfig.of({"adapters": [entry(1), entry(2)], "max_lora_rank": 8})
    moved = [entry(2, lora_path="/x"), entry(1, lora_path="/y")]
    assert RBLNLoRAConfig.of({"adapters": moved}).is_of(recorded)
    assert not RBLNLoRAConfig.of({"adapters": moved, "max_lora_rank": 16}).is_of(recorded)
    assert not RBLNLoRAConfig.of({"adapters": [entry(1)]}).is_of(recorded)
