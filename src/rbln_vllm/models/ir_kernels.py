# SPDX-License-Identifier: Apache-2.0
"""vLLM's IR operators as ``rbln::`` operators, so that captured graphs hold ours alone."""

import torch
from torch import Tensor
from vllm import ir

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """``rbln::rms_norm`` under vLLM's signature."""
    result: Tensor = torch.ops.rbln.rms_norm(x, weight, epsilon, variance_size or 0)
    return result


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``rbln::fused_add_rms_norm`` under vLLM's signature."""
    normed, residual = torch.ops.rbln.fused_add_rms_norm(
        x, x_residual, weight, epsilon, variance_size or 0
    )
    return normed, residual


ir.ops.rms_norm.register_impl("rbln")(rms_norm)
ir.ops.fused_add_rms_norm.register_impl("rbln")(fused_add_rms_norm)
