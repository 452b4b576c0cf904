# SPDX-License-Identifier: Apache-2.0
"""vLLM's mixture-of-experts layers as three ``rbln::`` operators.

Registered through vLLM's hooks for out-of-tree layers, like those of ``layers.py``: the method
that multiplies with unquantised experts, and the runner, which reaches it by a custom operator
that hides it from the capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)

OAI_ALPHA = 1.702
"""GptOss's gate, ``x * sigmoid(alpha * x)``: for this alpha it is ``quick_gelu``."""
OAI_LIMIT = 7.0


@dataclass(frozen=True)
class Gate:
    """How an expert joins its two halves; see ``rbln_host.ops.gated_product``."""

    activation: str
    limit: float = 0.0
    offset: float = 0.0
    interleaved: bool = False
    """Whether gates and ups take turns in the checkpoint's weights."""


_GATES = {
    MoEActivation.SILU: Gate("silu"),
    MoEActivation.GELU: Gate("gelu"),
    MoEActivation.GELU_TANH: Gate("gelu_tanh"),
    MoEActivation.SWIGLUOAI: Gate("quick_gelu", OAI_LIMIT, 1.0, interleaved=True),
}


@CustomOp.register_oot(name=UnquantizedFusedMoEMethod.__name__)
class RblnMoEMethod(UnquantizedFusedMoEMethod):
    """Routes and multiplies in ``rbln::`` operators."""

    @property
    def is_monolithic(self) -> bool:
        """It routes by itself."""
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the rows of the gates first. NotImplementedError for what no operator computes."""
        check_layer(layer)
        if not _GATES[layer.activation].interleaved:
            return
        layer.w13_weight.data = _halves_first(layer.w13_weight.data)
        if hasattr(layer, "w13_bias"):
            layer.w13_bias.data = _halves_first(layer.w13_bias.data)

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """``[N, hidden]`` for ``x`` of the same shape and ``router_logits`` ``[N, experts]``."""
        gate = _GATES[layer.activation]
        weights_NS, experts_NS = torch.ops.rbln.route(router_logits, layer.top_k, layer.renormalize)
        gated_NSI = torch.ops.rbln.gated_experts(
            x,
            layer.w13_weight,
            getattr(layer, "w13_bias", None),
            experts_NS,
            gate.activation,
            gate.limit,
            gate.offset,
        )
        output_NH: Tensor = torch.ops.rbln.combine_experts(
            gated_NSI,
            layer.w2_weight,
            getattr(layer, "w2_bias", None),
            experts_NS,
            weights_NS.to(x.dtype),
        )
        return output_NH


@PluggableLayer.register_oot(name=MoERunner.__name__)
class RblnMoERunner(MoERunner):
    """Calls its method directly."""

    def _select_forward(self) -> Callable[..., Any]:
        return self._forward_directly

    def _forward_directly(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None,
        *_of_the_operator: Any,
    ) -> Any:
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)


def check_layer(layer: Any) -> None:
    """Raise NotImplementedError, in words, for experts or a router that no operator computes."""
    unlike = {
        f"activation {layer.activation.value}": layer.activation not in _GATES,
        f"scoring {layer.scoring_func}": layer.scoring_func != "softmax",
        "grouped routing": layer.use_grouped_topk,
        "a routing function of its own": layer.custom_routing_function is not None,
        "a bias that corrects scores": layer.e_score_correction_bias is not None,
        "weights that are applied to the input": layer.apply_router_weight_on_input,
        "scaled weights": layer.routed_scaling_factor != 1.0,
        "experts on other devices": layer.expert_map is not None,
        "other limits than GptOss's": _own_limits(layer),
    }
    found = [name for name, is_so in unlike.items() if is_so]
    if found:
        raise NotImplementedError(
            f"{layer.layer_name}: experts with {', '.join(found)} are not supported yet; use a "
            "model whose router chooses by softmax"
        )


def _own_limits(layer: Any) -> bool:
    expected = {"swiglu_alpha": OAI_ALPHA, "swiglu_limit": OAI_LIMIT, "swiglu_beta": 1.0}
    oai = layer.activation is MoEActivation.SWIGLUOAI
    given = {name: getattr(layer, name, None) for name in expected}
    return any(v is not None and not (oai and v == expected[n]) for n, v in given.items())


def _halves_first(both_EGX: Tensor) -> Tensor:
    halves_E2IX: Tensor = both_EGX.unflatten(1, (-1, 2)).transpose(1, 2)
    return halves_E2IX.flatten(1, 2)
