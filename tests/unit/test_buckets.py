# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_vllm.buckets import bucket_for, decode_buckets


@pytest.mark.parametrize(
    ("strategy", "max_batch", "parameters", "expected"),
    [
        # The vendor's table.
        ("exponential", 32, (2, 2, 4), (4, 8, 16, 32)),
        ("exponential", 8, (1, 2, 4), (1, 2, 4, 8)),
        ("linear", 16, (2, 4, 32), (4, 8, 12, 16)),
        ("linear", 8, (1, 2, 4), (2, 4, 6, 8)),
        # Edges.
        ("exponential", 8, (1, 2, 1), (8,)),
        ("exponential", 1, (1, 2, 32), (1,)),
        ("exponential", 16, (1, 2, 32), (1, 2, 4, 8, 16)),
        ("exponential", 12, (1, 2, 32), (1, 3, 6, 12)),
        ("exponential", 27, (2, 3, 32), (3, 9, 27)),
        ("exponential", 8, (8, 2, 4), (8,)),
        ("exponential", 7, (1, 10, 4), (7,)),
        ("linear", 3, (1, 1, 32), (1, 2, 3)),
        ("linear", 4, (1, 4, 32), (4,)),
        ("linear", 5, (1, 4, 32), (1, 5)),
    ],
)
def test_descending_strategies(
    strategy: str, max_batch: int, parameters: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    minimum, step, limit = parameters
    assert decode_buckets(strategy, max_batch, minimum=minimum, step=step, limit=limit) == expected


def test_default_is_the_largest_batch_alone() -> None:
    assert decode_buckets("exponential", 8) == (8,)


@pytest.mark.parametrize("manual", [(1, 3, 8), (8, 3, 1), [3, 8, 1]])
def test_manual_is_sorted(manual: Sequence[int]) -> None:
    assert decode_buckets("manual", 8, manual=manual) == (1, 3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "exponential", "max_batch": 4, "minimum": 5}, "min is 5, more than"),
        ({"strategy": "linear", "max_batch": 4, "minimum": 5}, "min is 5, more than"),
        ({"strategy": "exponential", "max_batch": 0}, "min is 1, more than"),
        ({"strategy": "exponential", "max_batch": 4, "limit": 0}, "limit is 0, must be > 0"),
        ({"strategy": "linear", "max_batch": 4, "limit": -1}, "limit is -1, must be > 0"),
        ({"strategy": "linear", "max_batch": 4, "step": 0}, "step is 0, must be > 0"),
        ({"strategy": "linear", "max_batch": 4, "step": -2}, "step is -2, must be > 0"),
        ({"strategy": "exponential", "max_batch": 4, "step": 1}, "must be > 1"),
        ({"strategy": "exponential", "max_batch": 4, "minimum": 0}, "min is 0, must be > 0"),
        ({"strategy": "manual", "max_batch": 8, "manual": (1, 4)}, "must equal the largest"),
        ({"strategy": "manual", "max_batch": 8, "manual": (1, 16)}, "must equal the largest"),
        ({"strategy": "manual", "max_batch": 8}, "is empty"),
        ({"strategy": "manual", "max_batch": 8, "manual": (8, 8)}, "contains a duplicate"),
        ({"strategy": "manual", "max_batch": 8, "manual": (0, 8)}, "must all be > 0"),
        ({"strategy": "exp", "max_batch": 8}, "unknown decode batch bucket strategy 'exp'"),
    ],
)
def test_errors_name_the_option(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_buckets(**arguments)


@given(
    strategy=st.sampled_from(["exponential", "linear"]),
    max_batch=st.integers(1, 4096),
    minimum=st.integers(1, 64),
    step=st.integers(2, 64),
    limit=st.integers(1, 64),
)
def test_invariants(strategy: str, max_batch: int, minimum: int, step: int, limit: int) -> None:
    minimum = min(minimum, max_batch)
    buckets = decode_buckets(strategy, max_batch, minimum=minimum, step=step, limit=limit)
    assert buckets[-1] == max_batch
    assert list(buckets) == sorted(set(buckets))
    assert 1 <= len(buckets) <= limit
    assert buckets[0] >= minimum


@given(st.sets(st.integers(1, 512), min_size=1), st.integers(1, 512))
def test_bucket_for_is_the_smallest_that_holds(manual: set[int], n: int) -> None:
    buckets = decode_buckets("manual", max(manual), manual=tuple(manual))
    holding = [bucket for bucket in buckets if bucket >= n]
    if holding:
        assert bucket_for(n, buckets) == min(holding)
    else:
        with pytest.raises(ValueError, match=f"no decode bucket holds {n} sequences"):
            bucket_for(n, buckets)
