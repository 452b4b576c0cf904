# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: ``rbln::route``, ``rbln::gated_experts`` and ``rbln::combine_experts``.

A token's row goes through the few experts its router chose (Shazeer et al., "Outrageously large
neural networks", 2017), each a gated pair of matrix products::

    weights_NS, experts_NS = route(logits_NE, top_k, renormalise)
    gated_NSI = gated_experts(input_NH, gate_up_EGH, ..., experts_NS, activation, limit, offset)
    output_NH = combine_experts(gated_NSI, down_EHI, ..., experts_NS, weights_NS)

Axes: ``N`` tokens, ``E`` experts, ``S`` chosen experts of a token, ``G = 2 * I``, the rows of the
gate first. An expert's number outside ``[0, E)`` stands for none: it adds nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rbln_host.ops.activation import activate, check_activation
from rbln_host.ops.library import define


def _route_meta(logits_NE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    _check_route(logits_NE, top_k)
    shape = (logits_NE.shape[0], top_k)
    return logits_NE.new_empty(shape), logits_NE.new_empty(shape, dtype=torch.int64)


@define(
    "route(Tensor logits_NE, int top_k, bool renormalise) -> (Tensor, Tensor)", meta=_route_meta
)
def route(logits_NE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Weights ``[N, top_k]`` in the dtype of the logits, and experts ``[N, top_k]`` int64.

    The experts with the largest logits, the largest first and of equals the lower number (NaN
    counts as largest). Their weights are the softmax of the logits, over the chosen ones when
    ``renormalise`` (softmax, choose and divide by the sum; or choose, then softmax), else over all;
    in fp32 and rounded once. Raises ValueError for other shapes.
    """
    _check_route(logits_NE, top_k)
    sorted_NE, order_NE = torch.sort(logits_NE.float(), dim=-1, descending=True, stable=True)
    scores_NS = sorted_NE[:, :top_k]
    if renormalise:
        weights_NS = torch.softmax(scores_NS, dim=-1)
    else:
        weights_NS = torch.softmax(sorted_NE, dim=-1)[:, :top_k]
    return weights_NS.to(logits_NE.dtype).contiguous(), order_NE[:, :top_k].contiguous()


def gated_product(gate: Tensor, up: Tensor, activation: str, limit: float, offset: float) -> Tensor:
    """``activation(gate) * (up + offset)``, in the dtype of the inputs.

    With ``limit`` above 0 gates are first cut off above it, and ups outside ``[-limit, limit]``.
    """
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activate(gate, activation) * (up + offset)


def _gated_experts_meta(  # noqa: PLR0917 (an operator's arguments)
    input_NH: Tensor,
    gate_up_EGH: Tensor,
    bias_EG: Tensor | None,
    experts_NS: Tensor,
    activation: str,
    limit: float,
    offset: float,
) -> Tensor:
    check_activation(activation)
    _check_gated(input_NH, gate_up_EGH, bias_EG, experts_NS)
    return input_NH.new_empty((*experts_NS.shape, gate_up_EGH.shape[1] // 2))


@define(
    "gated_experts(Tensor input_NH, Tensor gate_up_EGH, Tensor? bias_EG, Tensor experts_NS, "
    "str activation, float limit, float offset) -> Tensor",
    meta=_gated_experts_meta,
)
def gated_experts(  # noqa: PLR0917 (an operator's arguments)
    input_NH: Tensor,
    gate_up_EGH: Tensor,
    bias_EG: Tensor | None,
    experts_NS: Tensor,
    activation: str,
    limit: float,
    offset: float,
) -> Tensor:
    """The :func:`gated_product` of each token's row by each of its experts, ``[N, S, I]``.

    Computed in fp32, rounded once to the dtype of ``input_NH``; zeros where there is no expert.
    Shapes: ``gate_up_EGH`` ``[E, 2 * I, H]``, ``bias_EG`` ``[E, 2 * I]``, ``experts_NS`` int64 or
    int32. Raises ValueError for other shapes or dtypes and an activation not in ``ACTIVATIONS``.
    """
    check_activation(activation)
    _check_gated(input_NH, gate_up_EGH, bias_EG, experts_NS)
    gated_NSI = input_NH.new_zeros((*experts_NS.shape, gate_up_EGH.shape[1] // 2))
    for expert in range(gate_up_EGH.shape[0]):
        token_R, place_R = torch.where(experts_NS == expert)
        bias_G = None if bias_EG is None else bias_EG[expert].float()
        both_RG = functional.linear(input_NH[token_R].float(), gate_up_EGH[expert].float(), bias_G)
        gate_RI, up_RI = both_RG.chunk(2, dim=-1)
        gated_RI = gated_product(gate_RI, up_RI, activation, limit, offset)
        gated_NSI[token_R, place_R] = gated_RI.to(input_NH.dtype)
    return gated_NSI


def _combine_experts_meta(
    gated_NSI: Tensor,
    down_EHI: Tensor,
    bias_EH: Tensor | None,
    experts_NS: Tensor,
    weights_NS: Tensor,
) -> Tensor:
    _check_combine(gated_NSI, down_EHI, bias_EH, experts_NS, weights_NS)
    return gated_NSI.new_empty((gated_NSI.shape[0], down_EHI.shape[1]))


@define(
    "combine_experts(Tensor gated_NSI, Tensor down_EHI, Tensor? bias_EH, Tensor experts_NS, "
    "Tensor weights_NS) -> Tensor",
    meta=_combine_experts_meta,
)
def combine_experts(
    gated_NSI: Tensor,
    down_EHI: Tensor,
    bias_EH: Tensor | None,
    experts_NS: Tensor,
    weights_NS: Tensor,
) -> Tensor:
    """The sum of ``weight * (gated @ down.T + bias)`` over a token's experts, ``[N, H]``.

    Added up in the order of the experts' numbers, in fp32, and rounded once to the dtype of
    ``gated_NSI``. Shapes: ``down_EHI`` ``[E, H, I]``, ``bias_EH`` ``[E, H]``, ``experts_NS`` int64
    or int32. Raises ValueError for other shapes or dtypes.
    """
    _check_combine(gated_NSI, down_EHI, bias_EH, experts_NS, weights_NS)
    total_NH = torch.zeros((gated_NSI.shape[0], down_EHI.shape[1]), device=gated_NSI.device)
    for expert in range(down_EHI.shape[0]):
        token_R, place_R = torch.where(experts_NS == expert)
        bias_H = None if bias_EH is None else bias_EH[expert].float()
        source_RI = gated_NSI[token_R, place_R].float()
        down_RH = functional.linear(source_RI, down_EHI[expert].float(), bias_H)
        weight_R1 = weights_NS[token_R, place_R, None].float()
        total_NH.index_add_(0, token_R, weight_R1 * down_RH)
    return total_NH.to(gated_NSI.dtype)


def _check_route(logits_NE: Tensor, top_k: int) -> None:
    if logits_NE.dim() != 2 or not logits_NE.dtype.is_floating_point:
        raise ValueError(f"route: logits {logits_NE.dtype} {tuple(logits_NE.shape)}, not [N, E]")
    if not 0 < top_k <= logits_NE.shape[1]:
        raise ValueError(f"route: {top_k} of {logits_NE.shape[1]} experts cannot be chosen")


def _check_gated(
    input_NH: Tensor, gate_up_EGH: Tensor, bias_EG: Tensor | None, experts_NS: Tensor
) -> None:
    fits = (
        input_NH.dim() == 2
        and experts_NS.dim() == 2
        and experts_NS.shape[0] == input_NH.shape[0]
        and gate_up_EGH.dim() == 3
        and gate_up_EGH.shape[1] % 2 == 0
    )
    _check_weights(
        "gated_experts",
        fits=fits,
        source=input_NH,
        weight=gate_up_EGH,
        bias=bias_EG,
        experts_NS=experts_NS,
    )


def _check_combine(
    gated_NSI: Tensor,
    down_EHI: Tensor,
    bias_EH: Tensor | None,
    experts_NS: Tensor,
    weights_NS: Tensor,
) -> None:
    fits = (
        gated_NSI.dim() == 3
        and experts_NS.shape == weights_NS.shape == gated_NSI.shape[:2]
        and weights_NS.dtype == gated_NSI.dtype
        and down_EHI.dim() == 3
    )
    _check_weights(
        "combine_experts",
        fits=fits,
        source=gated_NSI,
        weight=down_EHI,
        bias=bias_EH,
        experts_NS=experts_NS,
    )


def _check_weights(
    operator: str,
    *,
    fits: bool,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    experts_NS: Tensor,
) -> None:
    fits = (
        fits
        and source.shape[-1] == weight.shape[2]
        and source.dtype == weight.dtype
        and (bias is None or (bias.shape == weight.shape[:2] and bias.dtype == weight.dtype))
        and experts_NS.dtype in {torch.int32, torch.int64}
    )
    if not fits:
        added = "none" if bias is None else f"{bias.dtype} {tuple(bias.shape)}"
        raise ValueError(
            f"{operator}: input {source.dtype} {tuple(source.shape)}, weight {weight.dtype} "
            f"{tuple(weight.shape)}, bias {added} and experts {experts_NS.dtype} "
            f"{tuple(experts_NS.shape)} do not fit"
        )
