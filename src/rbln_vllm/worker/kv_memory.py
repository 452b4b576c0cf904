# SPDX-License-Identifier: Apache-2.0
"""Memory of the KV pool that is taken as blocks are first used, not at start."""

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def lazy_bytes(size: int) -> Tensor:
    """``size`` zero bytes as an int8 tensor; the system gives each page at its first write."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.int8)


class LazyPool(TorchFunctionMode):
    """An allocation context: vLLM's one zeroed buffer for the pool becomes lazy memory.

    ``torch.zeros`` writes every byte: a pool of 6 GiB took 13 s and 6 GiB at start.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.int8 and args[0] > 0:
            return lazy_bytes(args[0])
        return func(*args, **options)
