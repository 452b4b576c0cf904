# SPDX-License-Identifier: Apache-2.0
"""Paged attention against its eager reference in fp32."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.host.native.attention_calls import (
    STRAY,
    AttentionCall,
    Heads,
    Rules,
    build,
    calls,
)
from tests.unit.host.native.programs import assert_same_bits, random, run
from tests.unit.host.native.strategies import each_dtype, each_level, few

FEW = (1, 2, 3, 15)
"""Queries per sequence that go one by one."""
MANY = (16, 17, 40, 64)
"""Queries per sequence that go in blocks."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Values are about 1. Weights of blocks of queries are rounded to bfloat16 before the product."""


def check(call: AttentionCall, isa: str) -> None:
    out = call.output()
    run(call.op(out), isa)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), call.exact(), rtol=tolerance, atol=tolerance)
    assert not out[call.positions < 0].any()


@each_level
@each_dtype
@settings(few, max_examples=25)
@given(st.data())
def test_few_queries(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(calls(dtype, FEW)), isa)


@each_level
@each_dtype
@settings(few, max_examples=15)
@given(st.data())
def test_many_queries(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(calls(dtype, MANY)), isa)


@each_level
@each_dtype
@pytest.mark.parametrize("window", [0, 100, 200])
def test_long_contexts(isa: str, dtype: torch.dtype, window: int) -> None:
    """Several parts and tiles, of which a window leaves some out."""
    heads, rules = Heads(2, 3, 32, 16), Rules(window=window)
    check(build(1, heads, [[1100], [699], [3]], rules, dtype), isa)
    rows = [[*range(1000, 1016)], [*range(90, 106)], [*range(600, 610), *[-1] * 6]]
    check(build(2, heads, rows, rules, dtype), isa)


@each_level
@each_dtype
def test_a_sink_may_take_everything(isa: str, dtype: torch.dtype) -> None:
    heads = Heads(1, 2, 16, 16)
    sinks = torch.tensor([200.0, -math.inf])
    for positions in ([[5]], [[*range(16)]]):
        call = build(1, heads, positions, Rules(sinks=sinks), dtype)
        check(call, isa)
        out = call.output()
        run(call.op(out), isa)
        assert not out[:, 0].any()
        assert out[:, 1].any()


@each_level
@each_dtype
def test_scores_far_apart(isa: str, dtype: torch.dtype) -> None:
    """Softmax takes scores of any size: one key wins, in the first tile or a later one."""
    for positions in ([[400]], [[*range(385, 401)]]):
        for winner in (3, 390):
            call = build(1, Heads(1, 1, 16, 16), positions, Rules(), dtype)
            block = int(call.table[0, winner // 16])
            call.query[...] = 100.0
            call.kv[block, :, winner % 16, :16] = 100.0
            out = call.output()
            run(call.op(out), isa)
            value = call.kv[block, 0, winner % 16, 16:].float()
            seen = call.positions >= winner
            torch.testing.assert_close(out[seen, 0].float(), value.expand(int(seen.sum()), -1))


@each_level
@each_dtype
def test_a_nan_key_is_for_those_who_see_it(isa: str, dtype: torch.dtype) -> None:
    for positions in ([[3], [20]], [[*range(3, 27)]]):
        call = build(1, Heads(1, 2, 16, 16), positions, Rules(), dtype)
        for row in call.table:
            if 0 <= int(row[0]) < len(call.kv):
                call.kv[int(row[0]), :, 7, 0] = torch.nan
        out = call.output()
        run(call.op(out), isa)
        assert torch.equal(out.isnan().all(-1).all(-1), call.positions >= 7)
        assert torch.equal(out.isnan().any(-1).any(-1), call.positions >= 7)


@each_level
@each_dtype
def test_all_padding(isa: str, dtype: torch.dtype) -> None:
    for queries in (1, 16):
        call = build(1, Heads(1, 1, 16, 16), [[-1] * queries] * 2, Rules(), dtype)
        assert (call.table < 0).any()
        check(call, isa)


@each_level
@each_dtype
@pytest.mark.parametrize("queries", [1, 4, 16, 33])
@pytest.mark.parametrize("stray", STRAY)
def test_a_block_that_does_not_exist(
    isa: str, dtype: torch.dtype, queries: int, stray: int
) -> None:
    """Is a fault when it should hold a visible key. The next run is none the worse."""
    positions = [[*range(100, 100 + queries)], [*range(queries)]]
    call = build(1, Heads(2, 2, 32, 16), positions, Rules(window=50), dtype)
    block = call.table[0, 5].clone()
    call.table[0, 5] = stray
    out = call.output()
    with pytest.raises(IndexError, match=f"block {stray} "):
        run(call.op(out), isa)
    call.table[0, 5] = block
    check(call, isa)


@each_level
@each_dtype
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("beyond", [0, 1, 1 << 20, (1 << 31) - 200])
def test_a_position_beyond_the_table(
    isa: str, dtype: torch.dtype, queries: int, beyond: int
) -> None:
    call = build(1, Heads(1, 2, 32, 16), [[*range(100, 100 + queries)]], Rules(), dtype)
    call.positions[0] = call.table.shape[1] * 16 + beyond
    with pytest.raises(IndexError, match=f"position {int(call.positions[0])} "):
        run(call.op(call.output()), isa)
    call.positions[0] = 100
    check(call, isa)


@each_level
@each_dtype
@settings(few, max_examples=10)
@given(st.data(), st.sampled_from((FEW, MANY)))
def test_a_sequence_is_computed_alike_alone(
    isa: str, dtype: torch.dtype, data: st.DataObject, queries: tuple[int, ...]
) -> None:
    """Bit for bit."""
    call = data.draw(calls(dtype, queries))
    out = call.output()
    run(call.op(out), isa)
    for sequence in range(len(call.table)):
        alone = call.part(sequence, sequence + 1)
        again = alone.output()
        run(alone.op(again), isa)
        size = len(again)
        assert_same_bits(again, out[sequence * size : (sequence + 1) * size])


@each_level
@each_dtype
@pytest.mark.parametrize("window", [0, 1, 30, 77, 200])
@pytest.mark.parametrize("queries", [15, 64])
def test_a_query_is_computed_alike_among_others(
    isa: str, dtype: torch.dtype, window: int, queries: int
) -> None:
    """Bit for bit, in whichever block of queries it comes and whatever the others see."""
    positions = [*range(333, 333 + queries)]
    call = build(1, Heads(2, 3, 64, 16), [positions], Rules(window=window), dtype)
    cancel_values(call)
    out = call.output()
    run(call.op(out), isa)
    fewer = queries // 2 if queries > 16 else 1
    for first in (0, 5, queries - fewer):
        chosen = range(first, first + fewer)
        part = call.queries(0, chosen)
        again = part.output()
        run(part.op(again), isa)
        assert_same_bits(again, out[list(chosen)])


def cancel_values(call: AttentionCall) -> None:
    """Make every key's weight the same, and large values take each other back in groups of four:
    so a sum in another order differs by more than a rounding to bfloat16 hides."""
    call.query.zero_()
    blocks, heads, size, pair = call.kv.shape
    signs = torch.tensor((1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0)).repeat(size // 8)
    large = random(7, blocks, heads, size // 8, pair // 2, dtype=torch.float32) * 3000
    values = large.repeat_interleave(8, dim=2) * signs[:, None]
    small = call.kv[..., pair // 2 :] * (signs == 0)[:, None]
    call.kv[..., pair // 2 :] = values.to(small.dtype) + small
