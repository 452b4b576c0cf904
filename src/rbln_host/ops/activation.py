# SPDX-License-Identifier: Apache-2.0
"""Activations by name, and ``rbln::gated_activation`` (Shazeer, GLU Variants, 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rbln_host.ops.library import define

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
    "quick_gelu": lambda value: value * torch.sigmoid(1.702 * value),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu2": lambda value: torch.relu(value).square(),
}

ACTIVATIONS = tuple(_FUNCTIONS)
"""Names an ``activation`` argument may have."""


def activate(value: Tensor, activation: str) -> Tensor:
    """The activation of each element, in the dtype of ``value``; ValueError for no such name."""
    check_activation(activation)
    return _FUNCTIONS[activation](value)


def check_activation(activation: str) -> None:
    """Raise ValueError unless it is one of ``ACTIVATIONS``."""
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


def gate(gate_up_NG: Tensor, activation: str) -> Tensor:
    """``activation(first half) * second half`` of the last axis, in the dtype of the input."""
    gate_NI, up_NI = gate_up_NG.chunk(2, dim=-1)
    return activate(gate_NI, activation) * up_NI


def check_halves(operator: str, size: int) -> None:
    """Raise ValueError unless ``size`` divides into a gate and an up half."""
    if size % 2:
        raise ValueError(f"{operator}: {size} features are no two halves")


def _meta(gate_up_NG: Tensor, activation: str) -> Tensor:
    check_activation(activation)
    size = gate_up_NG.shape[-1]
    check_halves("gated_activation", size)
    return gate_up_NG.new_empty((*gate_up_NG.shape[:-1], size // 2))


@define("gated_activation(Tensor gate_up_NG, str activation) -> Tensor", meta=_meta)
def gated_activation(gate_up_NG: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` -> ``[..., I]``, computed in fp32 and rounded once.

    ``gate_up_NG`` is ``[..., 2 * I]``: the gate in the first half of the last axis, up in the
    second. Raises ValueError for an odd last axis or an activation not in ``ACTIVATIONS``.
    """
    check_halves("gated_activation", gate_up_NG.shape[-1])
    return gate(gate_up_NG.float(), activation).to(gate_up_NG.dtype).contiguous()
