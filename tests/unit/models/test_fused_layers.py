# SPDX-License-Identifier: Apache-2.0
"""Layers that emit one operator compute what vLLM's own layers do."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import activation
from vllm.model_executor.layers import rotary_embedding as rotary

import rbln_vllm.models.layers  # noqa: F401  (registers them)
from rbln_host.compiler.capture import capture

HEADS, KV_HEADS, HEAD_SIZE, POSITIONS, TOKENS = 4, 2, 8, 32, 5
PLAIN = {
    "head_size": HEAD_SIZE,
    "max_position_embeddings": POSITIONS,
    "base": 10000.0,
    "is_neox_style": True,
    "dtype": torch.float32,
}
SCALED: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {},
    "LinearScalingRotaryEmbedding": {"scaling_factors": [1.0, 4.0]},
    "DynamicNTKScalingRotaryEmbedding": {"scaling_factor": 2.0, "max_trained_positions": 16},
    "YaRNScalingRotaryEmbedding": {"scaling_factor": 4.0},
    "Llama3RotaryEmbedding": {
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "orig_max_position": 16,
    },
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    """vLLM's layers ask the current configuration how to run."""
    with patch.dict(os.environ):  # vLLM writes variables for processes that it would start
        config = VllmConfig()
    config.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(config):
        yield


def rope(name: str, rotary_dim: int = HEAD_SIZE, **overrides: Any) -> nn.Module:
    options = {**PLAIN, **SCALED[name], "rotary_dim": rotary_dim, **overrides}
    layer: nn.Module = getattr(rotary, name)(**options)
    return layer


def step(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(TOKENS, HEADS * HEAD_SIZE, dtype=dtype)
    key = torch.randn(TOKENS, KV_HEADS * HEAD_SIZE, dtype=dtype)
    return torch.tensor([0, 7, POSITIONS - 1, 3, 3]), query, key


def operators(layer: nn.Module, **inputs: Tensor) -> list[str]:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, **inputs: Tensor) -> Any:
            return self.layer(*inputs.values())

    commands = capture(Keywords(), inputs, "x").graph.commands
    return [c.operator for c in commands if c.operator not in ("aten::view", "aten::reshape")]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("name", list(SCALED))
def test_rotary_is_upstreams(name: str, neox: bool, dtype: torch.dtype) -> None:
    layer = rope(name, is_neox_style=neox, dtype=dtype)
    positions, query, key = step(dtype)
    expected = rotary.RotaryEmbedding.forward_native(layer, positions, query, key)
    for ours, theirs in zip(layer(positions, query, key), expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_part_of_a_head_may_be_rotated() -> None:
    layer = rope("RotaryEmbedding", rotary_dim=4)
    positions, query, _ = step(torch.float32)
    expected, _ = rotary.RotaryEmbedding.forward_native(layer, positions, query, None)
    rotated, nothing = layer(positions, query)
    torch.testing.assert_close(rotated, expected)
    assert nothing is None
    heads = query.view(TOKENS, HEADS, HEAD_SIZE)
    by_head, _ = layer(positions, heads)
    assert torch.equal(by_head.flatten(1), rotated)


@pytest.mark.parametrize("name", list(SCALED))
def test_rotary_is_one_operator_each(name: str) -> None:
    positions, query, key = step(torch.float32)
    found = operators(rope(name), positions=positions, query=query, key=key)
    assert found == ["rbln::rotary_embedding", "rbln::rotary_embedding"]


def test_other_rotary_layers_stay_upstreams() -> None:
    own_forward = {
        name
        for name, cls in vars(rotary).items()
        if isinstance(cls, type)
        and issubclass(cls, nn.Module)
        and getattr(cls, "forward_native", None) is not rotary.RotaryEmbedding.forward_native
    }
    assert {"MRotaryEmbedding", "DeepseekScalingRotaryEmbedding"} <= own_forward
    assert own_forward.isdisjoint(op_registry_oot)


GATED = {
    "silu": activation.SiluAndMul,
    "gelu": activation.GeluAndMul,
    "gelu_tanh": lambda: activation.GeluAndMul(approximate="tanh"),
}


@pytest.mark.parametrize("name", list(GATED))
def test_gated_activations_are_upstreams(name: str) -> None:
    layer = GATED[name]()
    gate_up = torch.randn(TOKENS, 12)
    upstream = type(layer).__mro__[1]
    theirs = getattr(upstream, "forward_native")  # noqa: B009 (of either kind)
    expected = theirs(gate_up) if name == "silu" else theirs(layer, gate_up)
    torch.testing.assert_close(layer(gate_up), expected)
    assert operators(layer, x=gate_up) == ["rbln::gated_activation"]


@pytest.mark.parametrize("upstream", [activation.NewGELU, activation.FastGELU])
def test_tanh_gelu_is_upstreams(upstream: type[CustomOp]) -> None:
    layer, hidden = upstream(), torch.randn(TOKENS, 12)
    torch.testing.assert_close(layer(hidden), upstream.forward_native(layer, hidden))
    assert operators(layer, x=hidden) == ["aten::gelu"]
