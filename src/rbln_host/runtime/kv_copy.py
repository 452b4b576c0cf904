# SPDX-License-Identifier: Apache-2.0
"""Copying the heads of KV blocks in every layer of a pool, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rbln_host.runtime.native import NativeRuntime

KVCopyOrder = tuple[int, int, int]
"""Copy from this block, to this block, so many tokens."""


class KVCopier(Protocol):
    """Copies within one pool."""

    def copy(self, copies: Sequence[KVCopyOrder]) -> None:
        """Carry the copies out in their order.

        Raises, before anything is copied, IndexError for a block that does not exist and
        ValueError for tokens outside 1 to ``block_size``.
        """


@dataclass(frozen=True)
class KVPool:
    """The memory of a pool: a tensor ``[num_blocks, num_kv_heads, block_size, width]`` per layer.

    A memory that several layers share is in it once. Raises ValueError for layers of other axes,
    with gaps, or that differ in blocks.
    """

    layers: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a KV pool needs at least one layer")
        for tensor in self.layers:
            if tensor.ndim != 4 or not tensor.is_contiguous():
                raise ValueError(f"a KV layer needs four axes without gaps: {_about(tensor)}")
        if len({(tensor.shape[0], tensor.shape[2]) for tensor in self.layers}) > 1:
            layers = ", ".join(_about(tensor) for tensor in self.layers)
            raise ValueError(f"the layers of a KV pool differ in their blocks: {layers}")

    @classmethod
    def of(cls, layers: Sequence[Tensor]) -> "KVPool":
        """Leave out layers whose memory is another's."""
        return cls(tuple({tensor.data_ptr(): tensor for tensor in layers}.values()))

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.layers[0].shape[2]


class NativeKVCopier:
    """By the threads of the native executor."""

    def __init__(self, pool: KVPool, runtime: NativeRuntime) -> None:
        self._pool, self._threads = pool, runtime.pool  # the copier holds addresses only
        self._copier = runtime.compiler.extension.KVCopier(
            [
                (tensor.data_ptr(), tensor.shape[1], tensor.shape[3] * tensor.element_size())
                for tensor in pool.layers
            ],
            pool.num_blocks,
            pool.block_size,
        )

    def copy(self, copies: Sequence[KVCopyOrder]) -> None:
        self._copier.copy(self._threads, copies)


class TorchKVCopier:
    """By torch's copies, one for each layer and order."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def copy(self, copies: Sequence[KVCopyOrder]) -> None:
        for order in copies:
            self._check(*order)
        for source, target, tokens in copies:
            for pool_BHND in self._pool.layers:
                pool_BHND[target, :, :tokens].copy_(pool_BHND[source, :, :tokens])

    def _check(self, source: int, target: int, tokens: int) -> None:
        num_blocks, block_size = self._pool.num_blocks, self._pool.block_size
        for block in (source, target):
            if not 0 <= block < num_blocks:
                raise IndexError(f"KV copy: block {block} is not one of the {num_blocks} blocks")
        if not 1 <= tokens <= block_size:
            raise ValueError(f"KV copy: {tokens} tokens are not 1 to {block_size}")


def _about(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()}"
