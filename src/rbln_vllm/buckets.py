# SPDX-License-Identifier: Apache-2.0
"""Decode batch buckets: the batch sizes that get a decode program of their own.

A decode step runs in the smallest bucket that holds it; the rest of the rows is padding.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

STRATEGIES = ("exponential", "linear", "manual")


def check_bucket_parameters(
    strategy: str, minimum: int, step: int, limit: int, manual: Sequence[int]
) -> None:
    """Raises ValueError for parameters that are wrong whatever the largest batch is."""
    if strategy not in STRATEGIES:
        raise ValueError(
            f"unknown decode batch bucket strategy {strategy!r}: use one of {', '.join(STRATEGIES)}"
        )
    for name, value in (("min", minimum), ("step", step), ("limit", limit)):
        if value <= 0:
            raise ValueError(f"decode_batch_bucket_{name} is {value}, must be > 0")
    if strategy == "exponential" and step <= 1:
        raise ValueError(
            f"decode_batch_bucket_step is {step}: exponential buckets divide by it, so it must be "
            "> 1"
        )
    _check_manual_buckets(strategy, manual)


def _check_manual_buckets(strategy: str, manual: Sequence[int]) -> None:
    if strategy == "manual" and not manual:
        raise ValueError(
            "decode_batch_bucket_manual_buckets is empty: strategy manual needs at least one bucket"
        )
    if any(bucket <= 0 for bucket in manual):
        raise ValueError(f"decode_batch_bucket_manual_buckets {list(manual)} must all be > 0")
    if len(set(manual)) != len(manual):
        raise ValueError(f"decode_batch_bucket_manual_buckets {list(manual)} contains a duplicate")


def decode_buckets(
    strategy: str,
    max_batch: int,
    *,
    minimum: int = 1,
    step: int = 2,
    limit: int = 1,
    manual: Sequence[int] = (),
) -> tuple[int, ...]:
    """The decode buckets, ascending; the last one is always `max_batch`.

    `exponential` divides by `step` and `linear` subtracts it, from `max_batch` down to `minimum`,
    at most `limit` buckets. `manual` takes `manual`, whose largest must be `max_batch`.

    Raises ValueError for parameters out of range, naming the option.
    """
    check_bucket_parameters(strategy, minimum, step, limit, manual)
    if strategy == "manual":
        return _manual_buckets(max_batch, manual)
    if max_batch < minimum:
        raise ValueError(
            f"decode_batch_bucket_min is {minimum}, more than the largest decode batch {max_batch}:"
            " lower it or raise max_num_seqs"
        )
    if strategy == "exponential":
        return _descend(max_batch, minimum, limit, lambda bucket: bucket // step)
    return _descend(max_batch, minimum, limit, lambda bucket: bucket - step)


def _manual_buckets(max_batch: int, manual: Sequence[int]) -> tuple[int, ...]:
    buckets = tuple(sorted(manual))
    if buckets[-1] != max_batch:
        raise ValueError(
            f"the largest of decode_batch_bucket_manual_buckets {list(buckets)} must equal the "
            f"largest decode batch {max_batch} (max_num_seqs // pipeline_parallel_size)"
        )
    return buckets


def _descend(
    start: int, minimum: int, limit: int, smaller: Callable[[int], int]
) -> tuple[int, ...]:
    buckets = [start]
    while len(buckets) < limit and (bucket := smaller(buckets[-1])) >= minimum:
        buckets.append(bucket)
    return tuple(reversed(buckets))


def bucket_for(n: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `n` rows; ValueError if none does."""
    index = bisect_left(buckets, n)
    if index == len(buckets):
        raise ValueError(f"no decode bucket holds {n} sequences: the buckets are {list(buckets)}")
    return buckets[index]
