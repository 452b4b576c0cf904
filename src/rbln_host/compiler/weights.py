# SPDX-License-Identifier: Apache-2.0
"""Weights as programs read them: a shape and dtype, and the memory layouts at hand."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import blake3
import torch
from torch import Tensor

from rbln_host.compiler.capture import Captured
from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.pack import Layout, layout_of, pack, packed_weights, unpack

ALIGNMENT = 64
"""Bytes of a cache line. Packed weights start at a multiple, so that no vector straddles two."""


@dataclass(frozen=True)
class Weight:
    """One weight in one or more layouts. Raises ValueError when a copy has not the shape and
    dtype of its layout, is not contiguous, or when there is none."""

    spec: TensorSpec
    copies: Mapping[Layout, Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.copies:
            raise ValueError("a weight has at least one layout")
        for layout, tensor in self.copies.items():
            wanted = TensorSpec(layout.shape(self.spec), self.spec.dtype)
            if not wanted.matches(tensor) or not tensor.is_contiguous():
                raise ValueError(
                    f"{tensor.dtype} {tuple(tensor.shape)} is no {layout} copy of a weight "
                    f"{self.spec.dtype} {self.spec.shape}"
                )

    @classmethod
    def of(cls, tensor: Tensor, *, packed: bool) -> "Weight":
        """In memory: packed if some kernel reads it so and it can be, else as it is."""
        spec = spec_of(tensor)
        layout = layout_of(spec, packed)
        memory = in_layout(tensor, layout)
        return cls(spec, {layout: memory})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.copies.values())

    @property
    def packed(self) -> Tensor | None:
        """The packed copy, if there is one."""
        return self.copies.get(Layout.ROWS16)

    def plain(self) -> Tensor:
        """The row-major weight; a new copy on each call when only a packed one is at hand."""
        plain, packed = self.copies.get(Layout.PLAIN), self.packed
        if plain is not None:
            return plain
        assert packed is not None
        return unpack(packed, *self.spec.shape)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """A contiguous tensor in this layout: ``tensor`` itself if it already is one."""
    return pack(tensor) if layout is Layout.ROWS16 else tensor.contiguous()


def packed_names(items: Iterable[Captured]) -> frozenset[str]:
    """Weights that some program of ``items`` reads packed."""
    return frozenset().union(*(packed_weights(item.graph) for item in items))


def content_digest(tensor: Tensor) -> str:
    """BLAKE3 of dtype, shape and elements, whatever the strides."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    hasher.update(raw_bytes(tensor))
    return str(hasher.hexdigest(length=16))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order, without a copy when they lie so."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
