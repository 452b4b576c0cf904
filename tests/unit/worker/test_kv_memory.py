# SPDX-License-Identifier: Apache-2.0
"""The pool's memory is zero, writable, and taken when it is used."""

import psutil
import torch

from rbln_vllm.worker.kv_memory import LazyPool, lazy_bytes

GIB = 1 << 30


def test_nothing_is_taken_until_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = lazy_bytes(4 * GIB)
    assert process.memory_info().rss - before < GIB // 8
    pool[: GIB // 4] = 1
    assert process.memory_info().rss - before > GIB // 8


def test_it_is_zero_and_writable_through_views() -> None:
    view = lazy_bytes(4096).view(torch.bfloat16).view(2, 4, 256)
    assert not view.any()
    view[1, 2, 3] = 5
    assert view.sum() == 5


def test_the_context_changes_vllms_buffer_alone() -> None:
    with LazyPool():
        pool = torch.zeros(GIB, dtype=torch.int8, device="cpu")
        other = torch.zeros((2, 3))
        nothing = torch.zeros(0, dtype=torch.int8)
    assert pool.shape == (GIB,)
    assert pool.data_ptr() % 4096 == 0
    assert other.shape == (2, 3)
    assert nothing.shape == (0,)
    assert torch.zeros(8, dtype=torch.int8).shape == (8,)
