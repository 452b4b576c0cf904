# SPDX-License-Identifier: Apache-2.0
"""``rbln::rms_norm`` and ``rbln::fused_add_rms_norm`` (Zhang and Sennrich, 2019), and
``rbln::layer_norm`` (Ba et al., 2016)."""

import torch
from torch import Tensor
from torch.nn import functional

from rbln_host.ops.library import define


@define(
    "rms_norm(Tensor hidden_NH, Tensor? weight_H, float epsilon, int variance_size) -> Tensor",
    meta=lambda hidden_NH, *_args: torch.empty_like(hidden_NH),
)
def rms_norm(
    hidden_NH: Tensor, weight_H: Tensor | None, epsilon: float, variance_size: int
) -> Tensor:
    """Root-mean-square normalisation of the last axis, computed in fp32.

    ``variance_size`` > 0 takes the mean square over that many leading features only.
    """
    normed_NH = _normalise(hidden_NH.float(), epsilon, variance_size)
    if weight_H is not None:
        normed_NH = normed_NH.to(weight_H.dtype) * weight_H
    return normed_NH.to(hidden_NH.dtype)


@define(
    "fused_add_rms_norm(Tensor hidden_NH, Tensor residual_NH, Tensor? weight_H, float epsilon, "
    "int variance_size) -> (Tensor, Tensor)",
    meta=lambda hidden_NH, residual_NH, *_args: (
        torch.empty_like(hidden_NH),
        torch.empty_like(hidden_NH),
    ),
)
def fused_add_rms_norm(
    hidden_NH: Tensor,
    residual_NH: Tensor,
    weight_H: Tensor | None,
    epsilon: float,
    variance_size: int,
) -> tuple[Tensor, Tensor]:
    """Add the residual in fp32, normalise the sum; returns (normalised, new residual)."""
    sum_NH = hidden_NH.float() + residual_NH.float()
    normed_NH = _normalise(sum_NH, epsilon, variance_size)
    if weight_H is not None:
        normed_NH = normed_NH.to(weight_H.dtype) * weight_H
    return normed_NH.to(hidden_NH.dtype), sum_NH.to(hidden_NH.dtype)


@define(
    "layer_norm(Tensor hidden_NH, Tensor? weight_H, Tensor? bias_H, float epsilon) -> Tensor",
    meta=lambda hidden_NH, *_args: hidden_NH.new_empty(hidden_NH.shape),
)
def layer_norm(
    hidden_NH: Tensor, weight_H: Tensor | None, bias_H: Tensor | None, epsilon: float
) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, scale, shift; in fp32, rounded once."""
    weight = None if weight_H is None else weight_H.float()
    bias = None if bias_H is None else bias_H.float()
    normed_NH = functional.layer_norm(
        hidden_NH.float(), hidden_NH.shape[-1:], weight, bias, epsilon
    )
    return normed_NH.to(hidden_NH.dtype).contiguous()


def _normalise(hidden_NH: Tensor, epsilon: float, variance_size: int) -> Tensor:
    measured_NH = hidden_NH[..., :variance_size] if variance_size else hidden_NH
    mean_square_N1 = measured_NH.pow(2).mean(dim=-1, keepdim=True)
    return hidden_NH * torch.rsqrt(mean_square_N1 + epsilon)
