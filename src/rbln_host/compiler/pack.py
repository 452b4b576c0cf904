# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the one memory layout that matrix kernels of every instruction set read.

A weight ``[O, K]`` is cut into groups of 16 output features, the last one padded with zeros, and
within a group the features of one k lie side by side. So a kernel reads whole vectors, in order,
and each is multiplied with one input value (bfloat16: with one pair of them, as ``vdpbf16ps``
takes it).

========  ======================  ==================================
dtype     packed shape            element (o, k) is at
========  ======================  ==================================
bfloat16  [O/16, K/2, 16, 2]      [o // 16, k // 2, o % 16, k % 2]
others    [O/16, K, 16]           [o // 16, k, o % 16]
========  ======================  ==================================

Divisions round up. The matrices of a weight ``[E, O, K]``, one for each expert, are packed one
after the other: its packed shape begins with ``E``. The layout depends on nothing but the dtype, so
an artifact serves any machine.
"""

from enum import StrEnum

import torch
from torch import Tensor

from rbln_host.compiler.arguments import arguments_of
from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec

GROUP = 16
"""Output features that lie side by side."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be packed."""
_WEIGHT_ARGUMENT = {
    "rbln::linear": "weight_OK",
    "rbln::gated_linear": "weight_GK",
    "rbln::gated_experts": "gate_up_EGH",
    "rbln::combine_experts": "down_EHI",
    "rbln::lora_linear": "weight_OK",
    "rbln::lora_gated_linear": "weight_GK",
}


class Layout(StrEnum):
    """How a stored weight lies in memory."""

    PLAIN = "plain"
    """Row-major."""
    ROWS16 = "rows16"
    """Packed, as this module describes."""

    def shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Shape of the memory of a weight; ValueError when it cannot have this layout."""
        if self is Layout.PLAIN:
            return spec.shape
        if not packable(spec):
            raise ValueError(f"a weight {spec.dtype} {spec.shape} cannot be packed")
        *experts, rows, width = spec.shape
        groups = -(-rows // GROUP)
        if spec.dtype == torch.bfloat16:
            return (*experts, groups, -(-width // 2), GROUP, 2)
        return (*experts, groups, width, GROUP)


def packable(spec: TensorSpec) -> bool:
    """Whether a weight of this shape and dtype has a packed form."""
    return len(spec.shape) in {2, 3} and min(spec.shape) > 0 and spec.dtype in DTYPES


def pack(weight: Tensor) -> Tensor:
    """The packed copy of a weight ``[O, K]`` or ``[E, O, K]`` of any strides; ValueError unless
    it is one of a dtype in ``DTYPES``."""
    shape = Layout.ROWS16.shape(TensorSpec(tuple(weight.shape), weight.dtype))
    rows, width = weight.shape[-2:]
    padded = rows % GROUP or (width % 2 and weight.dtype == torch.bfloat16)
    packed = weight.new_zeros(shape) if padded else weight.new_empty(shape)
    if weight.dim() == 2:
        _copy_matrix(packed, weight)
        return packed
    for target, matrix_OK in zip(packed, weight, strict=True):
        _copy_matrix(target, matrix_OK)
    return packed


def unpack(packed: Tensor, *shape: int) -> Tensor:
    """The weight of this shape from its packed copy. ValueError when that has another's."""
    spec = TensorSpec(shape, packed.dtype)
    if not packable(spec) or tuple(packed.shape) != Layout.ROWS16.shape(spec):
        raise ValueError(f"packed {tuple(packed.shape)} does not hold {list(shape)}")
    *experts, rows, width = shape
    axes = (-3, -2) if packed.dtype == torch.bfloat16 else (-2, -1)
    plain = packed.transpose(*axes)
    return plain.reshape(*experts, -(-rows // GROUP) * GROUP, -1)[..., :rows, :width].contiguous()


def packed_weights(graph: Graph) -> frozenset[str]:
    """Names of the weights that the kernels of ``graph`` read packed: those a ``rbln::linear``, a
    ``rbln::gated_linear`` or experts name directly.

    Such a weight is stored packed only, whoever else reads it: of a tied embedding the table's
    kernel finds its rows in the packed copy.
    """
    values = (_packed_value(command) for command in graph.commands)
    return frozenset(graph.weights[value] for value in values if value in graph.weights)


def layout_of(spec: TensorSpec, packed: bool) -> Layout:
    """The layout to store a weight in, given whether some kernel reads it packed."""
    return Layout.ROWS16 if packed and packable(spec) else Layout.PLAIN


def _packed_value(command: Command) -> str | None:
    argument = _WEIGHT_ARGUMENT.get(command.operator)
    value = arguments_of(command).get(argument) if argument else None
    return value.name if isinstance(value, Ref) else None


def _copy_matrix(packed: Tensor, weight_OK: Tensor) -> None:
    rows, width = weight_OK.shape
    whole = rows // GROUP * GROUP
    _copy_groups(packed[: whole // GROUP], weight_OK[:whole])
    if whole < rows:
        last = weight_OK.new_zeros(GROUP, width)
        last[: rows - whole] = weight_OK[whole:]
        _copy_groups(packed[-1:], last)


def _copy_groups(packed: Tensor, weight_OK: Tensor) -> None:
    """Copy whole groups; pairs of bfloat16 move as one 32-bit integer where they lie together."""
    groups = packed.shape[0]
    if packed.dtype != torch.bfloat16:
        packed.copy_(weight_OK.unflatten(0, (groups, GROUP)).transpose(1, 2))
        return
    pairs, odd = divmod(weight_OK.shape[1], 2)
    if not odd and weight_OK.is_contiguous() and weight_OK.storage_offset() % 2 == 0:
        pairs_OK = weight_OK.view(torch.int32).unflatten(0, (groups, GROUP))
        packed.view(torch.int32).squeeze(-1).copy_(pairs_OK.transpose(1, 2))
        return
    if pairs:
        paired = weight_OK[:, : 2 * pairs].unflatten(1, (pairs, 2)).unflatten(0, (groups, GROUP))
        packed[:, :pairs].copy_(paired.permute(0, 2, 1, 3))
    if odd:
        packed[:, -1, :, 0] = weight_OK[:, -1].unflatten(0, (groups, GROUP))
