# SPDX-License-Identifier: Apache-2.0
"""What vLLM's mixture-of-experts layers are refused for, in words. That those which are not
compute what Hugging Face's do is shown by engines (tests/engine/test_architectures.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from rbln_vllm.models import moe_layers

PLAIN: dict[str, Any] = {
    "layer_name": "model.layers.0.mlp.experts",
    "activation": MoEActivation.SILU,
    "scoring_func": "softmax",
    "use_grouped_topk": False,
    "custom_routing_function": None,
    "e_score_correction_bias": None,
    "apply_router_weight_on_input": False,
    "routed_scaling_factor": 1.0,
    "expert_map": None,
    "swiglu_alpha": None,
    "swiglu_limit": None,
    "swiglu_beta": None,
}
GPT_OSS = {"activation": MoEActivation.SWIGLUOAI}


@pytest.mark.parametrize(
    "fields",
    [{}, GPT_OSS, {**GPT_OSS, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "swiglu_beta": 1.0}],
)
def test_taken(fields: dict[str, Any]) -> None:
    moe_layers.check_layer(SimpleNamespace(**{**PLAIN, **fields}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation": MoEActivation.SWIGLUSTEP}, "activation swiglustep"),
        ({"scoring_func": "sigmoid"}, "scoring sigmoid"),
        ({"use_grouped_topk": True}, "grouped routing"),
        ({"custom_routing_function": print}, "a routing function of its own"),
        ({"e_score_correction_bias": torch.zeros(4)}, "a bias that corrects scores"),
        ({"apply_router_weight_on_input": True}, "applied to the input"),
        ({"routed_scaling_factor": 2.5}, "scaled weights"),
        ({"expert_map": torch.zeros(4)}, "experts on other devices"),
        ({"swiglu_limit": 7.0}, "other limits"),
        ({**GPT_OSS, "swiglu_limit": 6.0}, "other limits"),
        ({**GPT_OSS, "swiglu_alpha": 1.0}, "other limits"),
    ],
)
def test_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"layers\.0\.mlp\.experts: .*{reason}"):
        moe_layers.check_layer(SimpleNamespace(**{**PLAIN, **fields}))


def test_registered_with_vllm() -> None:
    for name, kind in (
        ("UnquantizedFusedMoEMethod", moe_layers.RblnMoEMethod),
        ("MoERunner", moe_layers.RblnMoERunner),
    ):
        assert op_registry_oot[name] is kind
