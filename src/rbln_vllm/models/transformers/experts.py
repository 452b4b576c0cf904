# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as a straight line of matrix products: every expert sees every token.

Which experts a token is routed to depends on data, which a static program does not branch on. So
each expert's result is weighted by what the router gave it, mostly zero. A step of few tokens reads
all experts' weights, and a step of many computes experts/top_k times what was asked for.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel


class EveryExpert(torch.nn.Module):
    """Replaces an experts module, whose weights are ``[experts, ...]``, by one weight for each."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        source = cast(Any, experts)
        self._gate = source._apply_gate
        self.num_experts = int(source.gate_up_proj.shape[0])
        for index in range(self.num_experts):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(source, name)[index].detach()
                if source.is_transposed:
                    weight = weight.t().contiguous()
                self._add(name, index, weight)
                if source.has_bias:
                    self._add(f"{name}_bias", index, getattr(source, f"{name}_bias")[index])
        self._has_bias = bool(source.has_bias)
        # The gate is a method of the module that is replaced; its weights are ours now.
        experts._parameters.clear()

    def _add(self, name: str, index: int, tensor: Tensor) -> None:
        parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
        self.register_parameter(f"{name}_{index}", parameter)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, hidden]`` for ``top_k`` experts and their weights ``[N, top_k]``."""
        shape = (hidden_states.shape[0], self.num_experts)
        shares_NE = hidden_states.new_zeros(shape).scatter(
            1, top_k_index, top_k_weights.to(hidden_states.dtype)
        )
        total_NH: Tensor | None = None
        for index in range(self.num_experts):
            gated_NI = self._gate(self._linear("gate_up_proj", index, hidden_states))
            share_N1 = shares_NE[:, index : index + 1]
            weighted_NH = self._linear("down_proj", index, gated_NI) * share_N1
            total_NH = weighted_NH if total_NH is None else total_NH + weighted_NH
        assert total_NH is not None
        return total_NH

    def _linear(self, name: str, index: int, source_NK: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias_{index}") if self._has_bias else None
        return functional.linear(source_NK, getattr(self, f"{name}_{index}"), bias)


def spread_experts(model: PreTrainedModel) -> None:
    """Replace the experts modules of ``model``.

    Raises NotImplementedError for experts without a gate.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not hasattr(child, "is_transposed") or not hasattr(child, "_apply_gate"):
                continue
            if not getattr(child, "has_gate", False):
                raise NotImplementedError(
                    f"{type(child).__name__}: experts without a gate are not built yet"
                )
            setattr(parent, name, EveryExpert(child))
