# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's mixtures of experts with ours in their place compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rbln_vllm.models.transformers.experts import (
    Experts,
    Gate,
    Router,
    gate_of,
    renormalises,
    replace_experts,
)

COMMON = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 20, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 20},
}


def model_of(kind: str, **overrides: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**COMMON, **MODELS[kind], **overrides})
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_the_same_results(kind: str) -> None:
    ids = torch.arange(18).view(2, 9)
    model = model_of(kind)
    expected = model(ids).logits
    replace_experts(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(Experts) == kinds.count(Router) == 1
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_what_a_router_does_is_found_out(renormalise: bool) -> None:
    model = model_of("qwen3_moe", norm_topk_prob=renormalise)
    router = model.base_model.layers[0].mlp.gate
    before = router.weight
    assert renormalises(router) is renormalise
    assert router.weight is before
    assert router.hidden_dim == COMMON["hidden_size"]


def test_another_router_stays() -> None:
    """Sigmoid in place of softmax."""

    class Sigmoid(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.top_k = torch.nn.Parameter(torch.zeros(4, 24)), 2

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = hidden @ self.weight.T
            return logits, *logits.sigmoid().topk(self.top_k)

    assert renormalises(Sigmoid()) is None


def test_what_a_gate_computes_is_found_out() -> None:
    def gate(kind: str, **overrides: Any) -> Gate:
        return gate_of(model_of(kind, **overrides).base_model.layers[0].mlp.experts)

    assert gate("gpt_oss") == Gate("quick_gelu", 7.0, 1.0)
    assert gate("gpt_oss", swiglu_limit=3.0) == Gate("quick_gelu", 3.0, 1.0)
    assert gate("mixtral") == Gate("silu", 0.0, 0.0)
    assert gate("mixtral", hidden_act="gelu_pytorch_tanh") == Gate("gelu_tanh", 0.0, 0.0)
    with pytest.raises(NotImplementedError, match="its gate is none of"):
        gate("gpt_oss", swiglu_alpha=1.5)


def test_without_weights() -> None:
    """The shape of a model is asked for on the meta device."""
    with torch.device("meta"):
        config = AutoConfig.for_model("gpt_oss", **COMMON, **MODELS["gpt_oss"])
        model = AutoModelForCausalLM.from_config(config)
        replace_experts(model)
    experts = model.base_model.layers[0].mlp.experts
    assert isinstance(experts, Experts)
    assert experts.gate_up_EGH.shape == (4, 64, 24), "20 columns are filled up to 32"
    assert experts.down_EHI.shape == (4, 24, 32)
