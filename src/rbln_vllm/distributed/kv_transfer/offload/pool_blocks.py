# SPDX-License-Identifier: Apache-2.0
"""The KV pool as bytes, block by block over all layers."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.kv_offload.base import CanonicalKVCaches


class PoolBlocks:
    """Copies whole blocks between the pool and rows of bytes.

    A block's bytes are its pages, layer after layer. Layers of one buffer at equal distances, as
    vLLM allocates them, are one strided view: then a block is copied in one call, without the
    interpreter lock, so that other Python threads are not made to wait for each layer.
    """

    def __init__(self, kv_caches: CanonicalKVCaches) -> None:
        pages = [_bytes_of(cache.tensor, cache.page_size_bytes) for cache in kv_caches.tensors]
        self._views = _joined(pages)
        self.block_bytes = sum(int(view[0].size) for view in self._views)

    def store(self, block: int, into: NDArray[np.uint8]) -> None:
        """Pool to ``into``, ``block_bytes`` bytes."""
        start = 0
        for view in self._views:
            page = view[block]
            np.copyto(into[start : start + page.size].reshape(page.shape), page)
            start += page.size

    def load(self, block: int, source: NDArray[np.uint8]) -> None:
        """``source``, ``block_bytes`` bytes, to the pool."""
        start = 0
        for view in self._views:
            page = view[block]
            np.copyto(page, source[start : start + page.size].reshape(page.shape))
            start += page.size


def _bytes_of(tensor: Tensor, page_bytes: int) -> NDArray[np.uint8]:
    """``[num_blocks, page_bytes]`` bytes of one layer."""
    pages: NDArray[np.uint8] = tensor.numpy().view(np.uint8)
    return pages[:, :page_bytes]


def _joined(pages: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """One view ``[num_blocks, layers, page_bytes]`` if the layers lie evenly, else ``pages``."""
    first = pages[0]
    starts = np.array([page.ctypes.data for page in pages], dtype=np.int64)
    steps = np.diff(starts)
    alike = all(page.shape == first.shape and page.strides == first.strides for page in pages)
    if not alike or (steps != steps[:1]).any() or (steps < 0).any():
        return pages
    step = int(steps[0]) if len(steps) else 0
    view = np.lib.stride_tricks.as_strided(
        first,
        (first.shape[0], len(pages), first.shape[1]),
        (first.strides[0], step, first.strides[1]),
    )
    return [view]
