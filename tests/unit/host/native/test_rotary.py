# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding and the write of keys and values against their eager references in fp32."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import rotary_embedding, rotary_write_kv, write_kv
from tests.unit.host.native.programs import (
    INDEX_DTYPES,
    Op,
    assert_near,
    assert_same_bits,
    blank,
    random,
    run,
    spread,
)
from tests.unit.host.native.strategies import each_dtype, each_level, few, placed, seeds

POSITIONS = 40


@dataclass(frozen=True)
class Sizes:
    """Of a call. ``rotary`` is even and at most ``head_size``."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    rotary: int
    blocks: int
    block_size: int


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    head_size = draw(st.sampled_from((2, 6, 16, 30, 32, 64, 80, 128)))
    return Sizes(
        tokens=draw(st.sampled_from((0, 1, 2, 5, 17))),
        heads=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        head_size=head_size,
        rotary=2 * draw(st.integers(0, head_size // 2)),
        blocks=draw(st.integers(5, 8)),
        block_size=draw(st.sampled_from((4, 5, 16))),
    )


def table_of(seed: int, size: Sizes, dtype: torch.dtype) -> Tensor:
    angles = random(seed, POSITIONS, size.rotary // 2, dtype=torch.float32)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


@st.composite
def positions(draw: st.DrawFn, size: Sizes) -> Tensor:
    values = st.lists(st.integers(0, POSITIONS - 1), min_size=size.tokens, max_size=size.tokens)
    kept = torch.tensor(draw(values), dtype=draw(st.sampled_from(INDEX_DTYPES)))
    return placed(draw, kept, last_free=True)


@st.composite
def slots(draw: st.DrawFn, size: Sizes) -> Tensor:
    """Each slot once; some tokens are padding."""
    free = draw(st.permutations(range(size.blocks * size.block_size)))[: size.tokens]
    kept = [slot if draw(st.integers(0, 4)) else -1 - slot for slot in free]
    wanted = torch.tensor(kept, dtype=draw(st.sampled_from(INDEX_DTYPES)))
    return placed(draw, wanted, last_free=True)


@st.composite
def pools(draw: st.DrawFn, size: Sizes, dtype: torch.dtype) -> Tensor:
    """Never written: NaN. Its axes but the last lie in any order."""
    shape = (size.blocks, size.kv_heads, size.block_size, 2 * size.head_size)
    return placed(draw, torch.full(shape, torch.nan, dtype=dtype))


@each_level
@each_dtype
@few
@given(st.data())
def test_rotary(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, size, neox = data.draw(seeds), data.draw(sizes()), data.draw(st.booleans())
    shape = (size.tokens, size.heads, size.head_size)
    x = placed(data.draw, random(seed, *shape, dtype=dtype))
    where = data.draw(positions(size))
    table = placed(data.draw, table_of(seed, size, dtype))
    out = placed(data.draw, blank(shape, dtype))
    run(Op("rotary", [x, where, table, out], {"neox": float(neox)}), isa)
    assert_near(out, rotary_embedding(x.float(), where, table.float(), neox), scale=2)
    assert_same_bits(out[..., size.rotary :], x[..., size.rotary :])


@each_level
@each_dtype
def test_rotary_in_place(isa: str, dtype: torch.dtype) -> None:
    size = Sizes(3, 2, 2, 64, 48, 1, 1)
    values, where = random(1, 3, 2, 64, dtype=dtype), torch.tensor([5, 0, 39])
    table = table_of(2, size, dtype)
    for neox in (False, True):
        x = spread(values)
        run(Op("rotary", [x, where, table, x], {"neox": float(neox)}), isa)
        assert_near(x, rotary_embedding(values.float(), where, table.float(), neox), scale=2)


@each_level
@each_dtype
@few
@given(st.data(), seeds, sizes())
def test_write_kv(
    isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, size: Sizes
) -> None:
    shape = (size.tokens, size.kv_heads, size.head_size)
    key = placed(data.draw, random(seed, *shape, dtype=dtype))
    value = placed(data.draw, random(seed + 1, *shape, dtype=dtype))
    where, pool = data.draw(slots(size)), data.draw(pools(size, dtype))
    expected = pool.clone()
    write_kv(key, value, expected, where)
    run(Op("write_kv", [key, value, pool, where]), isa)
    assert_same_bits(pool, expected)


@each_level
@each_dtype
@few
@given(st.data())
def test_rotary_write_kv(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Query, key and value are slices of one projection, as models have them."""
    seed, size, neox = data.draw(seeds), data.draw(sizes()), data.draw(st.booleans())
    heads = size.heads + 2 * size.kv_heads
    qkv = placed(data.draw, random(seed, size.tokens, heads, size.head_size, dtype=dtype))
    query, key, value = qkv.split((size.heads, size.kv_heads, size.kv_heads), dim=1)
    where, at = data.draw(slots(size)), data.draw(positions(size))
    table = placed(data.draw, table_of(seed, size, dtype))
    pool = data.draw(pools(size, dtype))
    expected = pool.float().clone()
    turned = rotary_write_kv(
        query.float(), key.float(), value.float(), at, table.float(), expected, where, neox
    )
    out = placed(data.draw, blank(query.shape, dtype))
    tensors = [query, key, value, at, table, pool, where, out]
    run(Op("rotary_write_kv", tensors, {"neox": float(neox)}), isa)
    assert_near(out, turned, scale=2)
    assert_near(pool, expected, scale=2)
