# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside a linear: ``rbln::lora_shrink``, ``rbln::lora_linear`` and
``rbln::lora_gated_linear``.

An adapter adds ``B @ A @ x`` to ``W @ x`` (Hu et al., "LoRA", 2021; its scale is part of B here).
Several lie in *slots*, padded to one rank, and each token names the slot of its own, or none.
``lora_shrink`` computes ``A @ x``; the linears add ``B`` times that before they do anything else.
So a token without an adapter is computed as by ``rbln::linear``, bit for bit.

Names: ``S`` slots, ``R`` padded rank, ``M`` adapted modules of the model, ``N`` tokens. A linear
may hold several modules (query, key and value on top of each other): its *parts*. ``modules[p]`` is
the row of part p in ``ranks_MS``, which has the rank of each slot's adapter there, 0 for none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_host.ops.activation import activate, gate
from rbln_host.ops.library import define
from rbln_host.ops.linear import check_gated_linear, check_linear, product

NO_ADAPTER = -1
"""The slot of a token without an adapter; so is every negative number."""
LANES = 16
"""Output features of ``B`` that lie side by side."""
MAX_PARTS = 4
"""Adapted modules of one linear."""

_EXPANSION = (
    "Tensor shrunk_NR, Tensor slots_N, Tensor ranks_MS, Tensor[] b_SGR16, int[] modules, "
    "int[] starts, int[] sizes"
)


def pack_b(b_OR: Tensor) -> Tensor:
    """``B`` ``[O, r]`` as kernels read it: ``[ceil(O / 16), r, 16]``, padded with zeros."""
    features, rank = b_OR.shape
    padded_OR = b_OR.new_zeros(-(-features // LANES) * LANES, rank)
    padded_OR[:features] = b_OR
    packed_GR16: Tensor = padded_OR.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
    return packed_GR16


@dataclass(frozen=True)
class Expansion:
    """What linears take of adapters, beside their own arguments.

    ``shrunk_NR`` is of :func:`lora_shrink` over the same slots and modules. Part p is the output
    features ``starts[p]`` to ``starts[p] + sizes[p]``, and ``b_SGR16[p]`` its ``B`` as
    :func:`pack_b` packs it, for each slot: ``[S, ceil(size / 16), R, 16]``.
    """

    shrunk_NR: Tensor
    slots_N: Tensor
    ranks_MS: Tensor
    b_SGR16: Sequence[Tensor]
    modules: Sequence[int]
    starts: Sequence[int]
    sizes: Sequence[int]

    def check(self, input_NK: Tensor, features: int) -> None:
        """ValueError for operands that do not fit a linear of so many output features."""
        _check_common(input_NK, self.slots_N, self.ranks_MS, self.modules, self.b_SGR16)
        slots, end = self.ranks_MS.shape[1], 0
        for b, start, size in zip(self.b_SGR16, self.starts, self.sizes, strict=True):
            rank = self.shrunk_NR.shape[1] // len(self.b_SGR16)
            fits = tuple(b.shape) == (slots, -(-size // LANES), rank, LANES)
            if not fits or start < end or size < 1 or start + size > features:
                raise ValueError(f"lora: {tuple(b.shape)} is no B of features {start}+{size}")
            end = start + size
        shrunk = (self.slots_N.shape[0], len(self.b_SGR16) * self.b_SGR16[0].shape[2])
        if tuple(self.shrunk_NR.shape) != shrunk or self.shrunk_NR.dtype != torch.float32:
            raise ValueError(f"lora: shrunk is {tuple(self.shrunk_NR.shape)}, not fp32 {shrunk}")

    def add_to(self, sums_NO: Tensor) -> None:
        """Add each token's adapter to ``sums_NO``, fp32 ``[..., O]``, in place."""
        rows_NO, rank = sums_NO.view(-1, sums_NO.shape[-1]), self.b_SGR16[0].shape[2]
        for token, slot in _adapted(self.slots_N, self.ranks_MS):
            for part, (b, start) in enumerate(zip(self.b_SGR16, self.starts, strict=True)):
                used = _rank(self.ranks_MS, self.modules[part], slot, rank)
                shrunk_r = self.shrunk_NR[token, part * rank : part * rank + used]
                delta = (shrunk_r @ b[slot, :, :used].float()).flatten()[: self.sizes[part]]
                rows_NO[token, start : start + self.sizes[part]] += delta


def _shrink_meta(
    input_NK: Tensor,
    slots_N: Tensor,
    ranks_MS: Tensor,
    a_SRK: Sequence[Tensor],
    modules: Sequence[int],
) -> Tensor:
    _check_common(input_NK, slots_N, ranks_MS, modules, a_SRK)
    shape = (ranks_MS.shape[1], a_SRK[0].shape[1], input_NK.shape[-1])
    if any(tuple(a.shape) != shape for a in a_SRK):
        raise ValueError(f"lora: A is {[tuple(a.shape) for a in a_SRK]}, not each {shape}")
    return input_NK.new_empty((slots_N.shape[0], len(a_SRK) * shape[1]), dtype=torch.float32)


@define(
    "lora_shrink(Tensor input_NK, Tensor slots_N, Tensor ranks_MS, Tensor[] a_SRK, "
    "int[] modules) -> Tensor",
    meta=_shrink_meta,
)
def lora_shrink(
    input_NK: Tensor,
    slots_N: Tensor,
    ranks_MS: Tensor,
    a_SRK: Sequence[Tensor],
    modules: Sequence[int],
) -> Tensor:
    """``A @ x`` of each token's adapter in each part, fp32 ``[N, parts * R]``.

    Shapes: ``input_NK`` ``[..., K]`` of N tokens, ``slots_N`` ``[N]`` and ``ranks_MS`` ``[M, S]``
    integers, of each part ``a_SRK`` ``[S, R, K]`` of the input's dtype. What lies beyond a rank,
    and the row of a token without an adapter, is zero here and undefined in kernels. Raises
    ValueError for other shapes or dtypes, IndexError for a slot that does not exist.
    """
    shrunk_NR = torch.zeros_like(_shrink_meta(input_NK, slots_N, ranks_MS, a_SRK, modules))
    rows_NK = input_NK.reshape(-1, input_NK.shape[-1]).float()
    for token, slot in _adapted(slots_N, ranks_MS):
        for part, a in enumerate(a_SRK):
            rank, start = _rank(ranks_MS, modules[part], slot, a.shape[1]), part * a.shape[1]
            shrunk_NR[token, start : start + rank] = a[slot, :rank].float() @ rows_NK[token]
    return shrunk_NR


def _linear_meta(
    input_NK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    residual_NO: Tensor | None,
    activation: str,
    *adapters: object,
) -> Tensor:
    check_linear(input_NK, weight_OK, bias_O, residual_NO, activation)
    _expansion(adapters).check(input_NK, weight_OK.shape[0])
    return input_NK.new_empty((*input_NK.shape[:-1], weight_OK.shape[0]))


@define(
    "lora_linear(Tensor input_NK, Tensor weight_OK, Tensor? bias_O, Tensor? residual_NO, "
    f"str activation, {_EXPANSION}) -> Tensor",
    meta=_linear_meta,
)
def lora_linear(
    input_NK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    residual_NO: Tensor | None,
    activation: str,
    *adapters: object,
) -> Tensor:
    """``activation(input @ weight.T + B @ shrunk + bias) + residual``: ``linear`` and adapters.

    ``adapters`` are the fields of :class:`Expansion`. Computed in fp32 and rounded once. Raises
    ValueError as ``linear`` does and for adapters of other shapes, IndexError for a slot that
    does not exist.
    """
    _linear_meta(input_NK, weight_OK, bias_O, residual_NO, activation, *adapters)
    sums_NO = product(input_NK, weight_OK, bias_O)
    _expansion(adapters).add_to(sums_NO)
    output_NO = activate(sums_NO, activation)
    if residual_NO is not None:
        output_NO = output_NO + residual_NO.float()
    return output_NO.to(input_NK.dtype).contiguous()


def _gated_meta(
    input_NK: Tensor, weight_GK: Tensor, bias_G: Tensor | None, activation: str, *adapters: object
) -> Tensor:
    check_gated_linear(input_NK, weight_GK, bias_G, activation)
    _expansion(adapters).check(input_NK, weight_GK.shape[0])
    return input_NK.new_empty((*input_NK.shape[:-1], weight_GK.shape[0] // 2))


@define(
    "lora_gated_linear(Tensor input_NK, Tensor weight_GK, Tensor? bias_G, str activation, "
    f"{_EXPANSION}) -> Tensor",
    meta=_gated_meta,
)
def lora_gated_linear(
    input_NK: Tensor, weight_GK: Tensor, bias_G: Tensor | None, activation: str, *adapters: object
) -> Tensor:
    """``gated_linear`` and adapters, whose parts count the gate's features first.

    Raises as :func:`lora_linear` does.
    """
    _gated_meta(input_NK, weight_GK, bias_G, activation, *adapters)
    sums_NG = product(input_NK, weight_GK, bias_G)
    _expansion(adapters).add_to(sums_NG)
    return gate(sums_NG, activation).to(input_NK.dtype).contiguous()


def _expansion(adapters: Sequence[object]) -> Expansion:
    return Expansion(*adapters)  # type: ignore[arg-type]


def _adapted(slots_N: Tensor, ranks_MS: Tensor) -> Iterator[tuple[int, int]]:
    """The tokens with an adapter, and its slot."""
    for token, slot in enumerate(slots_N.tolist()):
        if slot >= ranks_MS.shape[1]:
            raise IndexError(f"adapter slot {slot} does not exist")
        if slot >= 0:
            yield token, slot


def _rank(ranks_MS: Tensor, module: int, slot: int, most: int) -> int:
    return min(max(int(ranks_MS[module, slot]), 0), most)


def _check_common(
    input_NK: Tensor,
    slots_N: Tensor,
    ranks_MS: Tensor,
    modules: Sequence[int],
    matrices: Sequence[Tensor],
) -> None:
    tokens = input_NK.numel() // max(1, input_NK.shape[-1])
    integers = all(t.dtype in {torch.int32, torch.int64} for t in (slots_N, ranks_MS))
    if not integers or tuple(slots_N.shape) != (tokens,) or ranks_MS.dim() != 2:
        raise ValueError(
            f"lora: slots {slots_N.dtype} {tuple(slots_N.shape)} and ranks {ranks_MS.dtype} "
            f"{tuple(ranks_MS.shape)} do not fit {tokens} tokens"
        )
    known = all(0 <= module < ranks_MS.shape[0] for module in modules)
    if not known or not 1 <= len(matrices) <= MAX_PARTS or len(modules) != len(matrices):
        raise ValueError(f"lora: modules {list(modules)} for {len(matrices)} matrices")
    if any(matrix.dtype != input_NK.dtype for matrix in matrices):
        raise ValueError(f"lora: adapters must be {input_NK.dtype} as the input")
