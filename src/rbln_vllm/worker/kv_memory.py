# SPDX-License-Identifier: Apache-2.0
"""Memory of the KV pool that is taken as blocks are first used, not at start."""

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def lazy_bytes(size: int) -> Tensor:
    """``size`` zero bytes as an int8 tensor; the system gives each page at its first write.

    Huge pages are asked for: attention reads blocks all over the pool, and with pages of 4 KiB it
    waits for address translation (reading alone: 14 GB/s with small pages, 20 with huge ones).
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)


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
