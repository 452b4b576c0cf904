# SPDX-License-Identifier: Apache-2.0
"""What kernel tests run over: every instruction set and dtype, and shapes and strides drawn."""

from typing import Protocol, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.host.native.programs import DTYPES, LEVELS, spread

Drawn = TypeVar("Drawn")


class Draw(Protocol):
    """What `@st.composite` gives a function, and `data.draw` of `st.data()`."""

    def __call__(self, strategy: st.SearchStrategy[Drawn], /) -> Drawn: ...


each_level = pytest.mark.parametrize("isa", LEVELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

few = settings(max_examples=20)
"""Examples of what runs at every level and type."""
many = settings(few, max_examples=60)

seeds = st.integers(0, 1 << 30)
rows = st.sampled_from((1, 2, 3, 5, 6, 7, 11, 12, 13, 15, 16, 17, 25, 40))
"""Rows of a matrix: the edges of a tile's rows."""
widths = st.sampled_from((1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 257))
"""Elements of a row: the edges of vectors of 16 and of pairs."""


@st.composite
def shapes(draw: st.DrawFn, least: int = 1, most: int = 4) -> tuple[int, ...]:
    """A few axes, the last one wider; some are empty."""
    leading = draw(st.lists(st.integers(0, 4), min_size=least - 1, max_size=most - 1))
    return (*leading, draw(widths))


@st.composite
def layouts(draw: st.DrawFn, axes: int, last_free: bool = False) -> dict[str, list[int]]:
    """Keywords of ``spread``: leading axes in any order with gaps; the last one inside them all,
    without a gap before its next element unless ``last_free``."""
    outer = draw(st.permutations(range(axes if last_free else axes - 1)))
    order = outer if last_free else [axes - 1, *outer]
    return {"gaps": draw(st.lists(st.integers(0, 3), min_size=axes, max_size=axes)), "order": order}


def placed(draw: Draw, tensor: Tensor, last_free: bool = False) -> Tensor:
    """The tensor in poisoned memory, with strides that are drawn."""
    return spread(tensor, **draw(layouts(tensor.dim(), last_free)))
