# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Operands are small: torch's threads would only get in the way of the pools'."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
