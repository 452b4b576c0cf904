# SPDX-License-Identifier: Apache-2.0
"""The seeded generators of a batch's rows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing_nothing(generators: dict[int, torch.Generator], rows: Iterable[int]) -> Iterator[None]:
    """Keep the generators of ``rows``, whose token is dropped, as they are.

    Upstream lets such a row draw and winds its generator back, which a CPU generator cannot.
    """
    kept = {row: generators.pop(row) for row in rows if row in generators}
    try:
        yield
    finally:
        generators.update(kept)
