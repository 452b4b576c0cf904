# SPDX-License-Identifier: Apache-2.0
"""Which texts share a step of an encoder."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_vllm.optimum.texts import Text, steps_of


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([64], [(0, 1)]),
        ([1, 1, 1], [(0, 2), (2, 3)]),
        ([32, 32, 1], [(0, 2), (2, 3)]),
        ([33, 32], [(0, 1), (1, 2)]),
        ([64, 64, 1], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_step_is_full_of_texts_or_of_tokens(
    lengths: list[int], expected: list[tuple[int, int]]
) -> None:
    assert list(steps_of(lengths, 2, 64)) == expected


@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 5), st.integers(64, 200))
def test_every_text_is_in_one_step_that_holds_it(
    lengths: list[int], texts: int, tokens: int
) -> None:
    steps = list(steps_of(lengths, texts, tokens))
    assert [place for first, last in steps for place in range(first, last)] == [
        *range(len(lengths))
    ]
    for first, last in steps:
        assert 0 < last - first <= texts
        assert sum(lengths[first:last]) <= tokens


def test_a_text_has_tokens_and_a_segment_for_each() -> None:
    assert len(Text(np.arange(3), np.zeros(3, int))) == 3
    with pytest.raises(ValueError, match="no token that is not padding"):
        Text(np.arange(0), np.zeros(0, int))
    with pytest.raises(ValueError, match="a segment for every token"):
        Text(np.arange(3), np.zeros(2, int))
