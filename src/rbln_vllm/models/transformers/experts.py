# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as three operators: which experts, their gated rows, and the weighted sum.

Hugging Face's own experts loop over those that were hit, which a static program cannot. What a
module's gate or router computes is found by trying it on a few numbers, so that one replacement
serves every architecture; a router that is none of ours stays as it is.
"""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rbln_host.ops import ACTIVATIONS, gated_product, route

GATED_COLUMNS = 16
"""``rbln::gated_experts`` takes gates of a multiple of this many features natively."""


@dataclass(frozen=True)
class Gate:
    """How an expert joins its two halves; see ``rbln_host.ops.gated_product``."""

    activation: str
    limit: float
    offset: float


class Experts(torch.nn.Module):
    """Replaces an experts module, and takes its weights.

    ``gate_up_EGH`` has the rows of the gate first, each half filled up with zeros to a multiple of
    ``GATED_COLUMNS``. Raises NotImplementedError for a gate that no operator has.
    """

    gate_up_bias_EG: Tensor | None
    down_bias_EH: Tensor | None

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        source = cast(Any, experts)
        self._gate = gate_of(source)
        self.gate_up_EGH = _parameter(_halves_first(_rows_first(source, "gate_up_proj"), source))
        down_EHI = _rows_first(source, "down_proj")
        self.down_EHI = _parameter(functional.pad(down_EHI, (0, _lacking(down_EHI.shape[2]))))
        bias = source.gate_up_proj_bias.detach() if source.has_bias else None
        bias_EG = None if bias is None else _halves_first(bias[..., None], source)[..., 0]
        self.gate_up_bias_EG = None if bias_EG is None else _parameter(bias_EG)
        self.down_bias_EH = _parameter(source.down_proj_bias) if source.has_bias else None
        experts._parameters.clear()  # of one layer at a time both forms are in memory

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, hidden]`` for ``top_k`` experts and their weights ``[N, top_k]``."""
        gated_NSI = torch.ops.rbln.gated_experts(
            hidden_states,
            self.gate_up_EGH,
            self.gate_up_bias_EG,
            top_k_index,
            self._gate.activation,
            self._gate.limit,
            self._gate.offset,
        )
        weights_NS = top_k_weights.to(hidden_states.dtype)
        output_NH: Tensor = torch.ops.rbln.combine_experts(
            gated_NSI, self.down_EHI, self.down_bias_EH, top_k_index, weights_NS
        )
        return output_NH


class Router(torch.nn.Module):
    """Replaces a router whose results are those of ``rbln::route``."""

    def __init__(self, router: torch.nn.Module, renormalise: bool) -> None:
        super().__init__()
        self.weight = cast(torch.nn.Parameter, router.weight)
        self.bias = cast(torch.nn.Parameter | None, getattr(router, "bias", None))
        self.top_k, self._renormalise = int(cast(Any, router).top_k), renormalise

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``[N, experts]``, weights and experts ``[N, top_k]``."""
        hidden_NH = hidden_states.reshape(-1, self.weight.shape[1])
        logits_NE = functional.linear(hidden_NH, self.weight, self.bias)
        weights_NS, experts_NS = torch.ops.rbln.route(logits_NE, self.top_k, self._renormalise)
        return logits_NE, weights_NS, experts_NS


def replace_experts(model: PreTrainedModel) -> None:
    """Replace the experts of ``model`` and, where they do the same, its routers.

    Raises NotImplementedError for experts that no operator computes.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "is_transposed") and hasattr(child, "_apply_gate"):
                setattr(parent, name, Experts(child))
            elif _is_router(child) and (renormalise := renormalises(child)) is not None:
                setattr(parent, name, Router(child, renormalise))


def gate_of(experts: Any) -> Gate:
    """What the module's ``_apply_gate`` computes; NotImplementedError when it is none of ours."""
    if not getattr(experts, "has_gate", False):
        raise NotImplementedError(
            f"{type(experts).__name__}: experts without a gate are not built yet"
        )
    gate, up = _sample(2, 64, 8)
    joined = torch.stack((gate, up), dim=-1).flatten(-2)
    expected = experts._apply_gate(
        torch.cat((gate, up), dim=-1) if experts.is_concatenated else joined
    )
    limits = (0.0, float(getattr(experts, "limit", None) or 0.0))
    for activation, limit, offset in product(ACTIVATIONS, limits, (0.0, 1.0)):
        found = gated_product(gate, up, activation, limit, offset)
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return Gate(activation, limit, offset)
    raise NotImplementedError(
        f"{type(experts).__name__}: its gate is none of {', '.join(ACTIVATIONS)}, with or without "
        "a limit, which is not built yet: use --model-impl vllm"
    )


def renormalises(router: Any) -> bool | None:
    """How ``rbln::route`` does what the module does; None when it does something else."""
    hidden_NH = _sample(64, 8) / 30  # small: a softmax that is 0 somewhere has no order
    (weight_EH,) = _sample(1, router.weight.shape[0], 8)
    tried = copy.copy(router)
    bias_E = None if getattr(router, "bias", None) is None else weight_EH[:, 0].clone()
    given = {"weight": weight_EH} if bias_E is None else {"weight": weight_EH, "bias": bias_E}
    tried._parameters = {**router._parameters, **given}
    tried.hidden_dim = tried.hidden_size = 8
    logits_NE = functional.linear(hidden_NH, weight_EH, bias_E)
    expected = tried(hidden_NH)
    for renormalise in (True, False):
        found = (logits_NE, *route(logits_NE, int(router.top_k), renormalise))
        if _alike(found, expected):
            return renormalise
    return None


def _is_router(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return hasattr(module, "top_k") and weight is not None and weight.dim() == 2


def _alike(found: tuple[Tensor, ...], expected: Any) -> bool:
    if not isinstance(expected, tuple) or len(expected) != len(found):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


def _sample(*shape: int) -> Tensor:
    """Numbers large enough for limits to matter, the same every time."""
    generator = torch.Generator("cpu").manual_seed(0)
    return 6 * torch.randn(shape, generator=generator, device="cpu")


def _rows_first(source: Any, name: str) -> Tensor:
    """A weight as ``[experts, rows, columns]``."""
    weight: Tensor = getattr(source, name).detach()
    return weight.transpose(1, 2) if source.is_transposed else weight


def _halves_first(both_EGX: Tensor, source: Any) -> Tensor:
    """The rows of the gates, then those of the ups, each filled up to a multiple of 16."""
    split = (2, -1) if source.is_concatenated else (-1, 2)
    halves = both_EGX.unflatten(1, split)
    halves_E2IX = halves if source.is_concatenated else halves.transpose(1, 2)
    return functional.pad(halves_E2IX, (0, 0, 0, _lacking(halves_E2IX.shape[2]))).flatten(1, 2)


def _lacking(size: int) -> int:
    return -size % GATED_COLUMNS


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().contiguous(), requires_grad=False)
