# SPDX-License-Identifier: Apache-2.0
"""Attention in both directions against its eager reference in fp32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host import _native
from rbln_host.ops import encoder_attention
from tests.unit.host.native.programs import (
    ALL,
    CPUS,
    Op,
    assert_same_bits,
    blank,
    random,
    run,
    spread,
)
from tests.unit.host.native.strategies import each_dtype, each_level, few

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EDGES = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 95, 96, 97, 127, 128, 129, 257)
"""Lengths around blocks of queries and tiles of keys."""


@dataclass(frozen=True)
class Call:
    """``query`` ``[N, H, D]``, ``key`` and ``value`` ``[N, KVH, D]``; row starts ``[rows + 1]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])

    def run(self, isa: str, tokens: int = ALL, by_token: bool = False) -> Tensor:
        out = blank(self.query.shape, self.query.dtype)
        tensors = [self.query, self.key, self.value, self.starts, out]
        op = Op("encoder_attention", tensors, {"scale": self.scale}, by_token=by_token)
        run(op, isa, _native.Pool([CPUS[0]] * 2), tokens)
        return out

    def exact(self) -> Tensor:
        query, key, value = self.query.float(), self.key.float(), self.value.float()
        return encoder_attention(query, key, value, self.starts, self.scale)


def build(
    lengths: Sequence[int],
    dtype: torch.dtype,
    heads: tuple[int, int, int] = (4, 2, 32),
    padding: int = 0,
    *,
    first: int = 0,
    index_dtype: torch.dtype = torch.int32,
) -> Call:
    """Rows of these lengths; what lies before ``first`` and after the last is NaN.

    A row's values depend on its length and place alone, not on the other rows.
    """
    num_heads, kv_heads, size = heads
    ends = torch.tensor([first, *lengths]).cumsum(0)
    tokens = int(ends[-1]) + padding
    tensors = []
    for seed, count in enumerate((num_heads, kv_heads, kv_heads)):
        whole = torch.full((tokens, count, size), torch.nan, dtype=dtype)
        for row, length in enumerate(lengths):
            values = random(1000 * length + 10 * row + seed, length, count, size, dtype=dtype)
            whole[int(ends[row]) : int(ends[row + 1])] = values
        tensors.append(spread(whole, gaps=(0, 3, 5)))
    query, key, value = tensors
    return Call(query, key, value, ends.to(index_dtype))


def check(call: Call, isa: str) -> None:
    out, tolerance = call.run(isa), TOLERANCE[call.query.dtype]
    torch.testing.assert_close(out.float(), call.exact(), rtol=tolerance, atol=tolerance)
    assert not out[: int(call.starts[0])].any()
    assert not out[int(call.starts[-1]) :].any()


@each_level
@each_dtype
@settings(few, max_examples=20)
@given(st.data())
def test_rows_of_any_length(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 7))
    size = data.draw(st.sampled_from((16, 32, 64, 80, 128)))
    call = build(
        data.draw(st.lists(st.sampled_from(EDGES), min_size=0, max_size=4)),
        dtype,
        (kv_heads * group, kv_heads, size),
        padding=data.draw(st.sampled_from((0, 1, 20))),
        first=data.draw(st.sampled_from((0, 0, 3))),
        index_dtype=data.draw(st.sampled_from((torch.int32, torch.int64))),
    )
    check(call, isa)


@each_level
@each_dtype
def test_heads_are_shared_out_in_any_number(isa: str, dtype: torch.dtype) -> None:
    """All heads of a short row are one task, some of a longer one, one of a long one."""
    check(build([1, 12, 20, 30, 45, 70], dtype, (11, 11, 16)), isa)
    check(build([12, 20, 30], dtype, (22, 11, 16)), isa)


@each_level
@each_dtype
@pytest.mark.parametrize("length", [1, 16, 17, 129])
def test_a_row_alone_and_among_others(isa: str, dtype: torch.dtype, length: int) -> None:
    """Bit for bit, wherever the row lies."""
    alone = build([length], dtype)
    together = build([0, 33, 5, 128], dtype, padding=length + 9)
    start = int(together.starts[-1])
    for whole, part in zip(
        (together.query, together.key, together.value),
        (alone.query, alone.key, alone.value),
        strict=True,
    ):
        whole[start : start + length] = part
    starts = torch.cat((together.starts, torch.tensor([start + length]))).int()
    out = Call(together.query, together.key, together.value, starts).run(isa)
    assert_same_bits(out[start : start + length], alone.run(isa))


@each_level
@each_dtype
def test_padding_may_be_left_out(isa: str, dtype: torch.dtype) -> None:
    call = build([7, 30], dtype, padding=11)
    out = call.run(isa, tokens=37, by_token=True)
    assert_same_bits(out[:37], call.run(isa)[:37])
    assert out[37:].isnan().all()


@each_level
@each_dtype
@pytest.mark.parametrize("starts", [[-1, 4], [0, 5, 4], [0, 11], [11, 11], [3, 2, 9]])
def test_starts_that_descend_or_leave_the_tokens(
    isa: str, dtype: torch.dtype, starts: list[int]
) -> None:
    good = build([10], dtype)
    bad = Call(good.query, good.key, good.value, torch.tensor(starts))
    with pytest.raises(IndexError, match=r"row start -?[0-9]+ is before another's or outside"):
        bad.run(isa)
    with pytest.raises(IndexError, match=r"row start -?[0-9]+ is before another's or outside"):
        bad.exact()
    check(good, isa)


@each_level
@each_dtype
def test_a_nan_is_for_its_own_row(isa: str, dtype: torch.dtype) -> None:
    call = build([20, 40], dtype)
    call.key[5] = torch.nan
    out = call.run(isa)
    assert out[:20].isnan().all()
    assert not out[20:].isnan().any()
