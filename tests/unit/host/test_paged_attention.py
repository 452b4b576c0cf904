# SPDX-License-Identifier: Apache-2.0
"""`rbln::paged_attention` against attention written in plain loops over an unpaged cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import PADDING_POSITION, attention, paged_attention
from tests.unit.host.paged import (
    Pool,
    Rules,
    Sequence,
    Shape,
    plain_attention,
    poisoned_queries,
    pool_of,
    random_sequence,
)

WAYS = (0, 1000)
"""Values of FEW_QUERIES that make every row take one of the two ways to compute it."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def run(query: Tensor, pool: Pool, sequences: list[Sequence], rules: Rules) -> Tensor:
    positions = torch.tensor([p for s in sequences for p in s.query_positions], dtype=torch.int32)
    return paged_attention(
        query,
        pool.kv_cache,
        pool.block_table,
        positions,
        rules.scale,
        rules.window,
        rules.soft_cap,
        rules.sinks,
        rules.alibi_slopes,
    )


def first_visible(sequence: Sequence, rules: Rules) -> int:
    real = [p for p in sequence.query_positions if p >= 0]
    if not real:
        return len(sequence.keys)
    return max(0, min(real) - rules.window + 1) if rules.window else 0


def check(shape: Shape, sequences: list[Sequence], rules: Rules) -> None:
    query = poisoned_queries(shape, sequences)
    pool = pool_of(shape, sequences, [first_visible(s, rules) for s in sequences])
    before = pool.kv_cache.clone()
    expected = plain_attention(query, sequences, rules)
    tolerance = TOLERANCE[shape.dtype]
    for few in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "FEW_QUERIES", few)
            output = run(query, pool, sequences, rules)
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        assert output.dtype == shape.dtype
        assert output.is_contiguous()
    torch.testing.assert_close(pool.kv_cache, before, rtol=0, atol=0, equal_nan=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from((4, 8, 16))),
        block_size=draw(st.integers(1, 6)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
    )


@st.composite
def rules_for(draw: st.DrawFn, num_heads: int) -> Rules:
    heads = st.lists(st.floats(-2, 2), min_size=num_heads, max_size=num_heads).map(torch.tensor)
    return Rules(
        scale=draw(st.sampled_from((0.125, 0.3, 1.0))),
        window=draw(st.sampled_from((0, 0, 1, 2, 5))),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 1.5))),
        sinks=draw(st.none() | heads),
        alibi_slopes=draw(st.none() | heads.map(Tensor.abs)),
    )


@st.composite
def row_lengths(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Queries a row Q, then each row's context and how many of its Q queries are real."""
    queries = draw(st.integers(1, 5))
    context = st.integers(1, 13)
    rows = draw(st.lists(st.tuples(context, st.integers(0, queries)), min_size=1, max_size=4))
    return queries, [(max(length, real), real) for length, real in rows]


@settings(max_examples=50)
@given(data=st.data(), shape=shapes(), lengths=row_lengths(), seed=st.integers(0, 1000))
def test_equals_plain_attention(
    data: st.DataObject, shape: Shape, lengths: tuple[int, list[tuple[int, int]]], seed: int
) -> None:
    torch.manual_seed(seed)
    queries, rows = lengths
    sequences = [random_sequence(shape, context, real, queries) for context, real in rows]
    check(shape, sequences, data.draw(rules_for(shape.num_heads)))


@pytest.mark.parametrize("context", [1, 3, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_block_edges(context: int, window: int, dtype: torch.dtype) -> None:
    torch.manual_seed(context)
    shape = Shape(block_size=4, dtype=dtype)
    check(shape, [random_sequence(shape, context, 1, 1)], Rules(window=window))
    whole = random_sequence(shape, context, context, context + 2)
    check(shape, [whole], Rules(window=window))


def test_padding_rows_are_zero_and_read_nothing() -> None:
    shape = Shape()
    sequences = [random_sequence(shape, 4, 0, 2)]
    query = poisoned_queries(shape, sequences)
    assert query.isnan().all()
    pool = pool_of(shape, sequences, [4])
    assert pool.kv_cache.isnan().all()
    assert torch.equal(run(query, pool, sequences, Rules()), torch.zeros_like(query))
    assert PADDING_POSITION == -1


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rules", [Rules(), Rules(window=3), Rules(soft_cap=2.0)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("few", WAYS)
def test_a_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, rules: Rules, queries: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FEW_QUERIES", few)
    torch.manual_seed(7)
    shape = Shape(num_heads=6, num_kv_heads=3, head_size=16, block_size=8, dtype=dtype)
    sequences = [random_sequence(shape, context, queries, queries) for context in (3, 40, 17, 8)]
    query = poisoned_queries(shape, sequences)
    pool = pool_of(shape, sequences, [0] * 4)
    together = run(query, pool, sequences, rules).split(queries)
    for row, sequence in enumerate(sequences):
        alone = run(
            query.split(queries)[row],
            Pool(pool.kv_cache, pool.block_table[row : row + 1]),
            [sequence],
            rules,
        )
        assert torch.equal(alone, together[row])


def test_pool_may_be_a_strided_view() -> None:
    torch.manual_seed(1)
    shape = Shape()
    sequences = [random_sequence(shape, 9, 2, 3), random_sequence(shape, 5, 1, 3)]
    query = poisoned_queries(shape, sequences)
    pool = pool_of(shape, sequences, [0, 0])
    other_order = pool.kv_cache.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    every_second = torch.full((2 * len(pool.kv_cache), *pool.kv_cache.shape[1:]), float("nan"))
    every_second[::2] = pool.kv_cache
    expected = run(query, pool, sequences, Rules())
    for view in (other_order, every_second[::2]):
        assert not view.is_contiguous()
        output = run(query, Pool(view, pool.block_table), sequences, Rules())
        assert torch.equal(output, expected)


def test_queries_may_be_a_strided_view() -> None:
    torch.manual_seed(2)
    shape = Shape()
    sequences = [random_sequence(shape, 6, 2, 2)]
    query = poisoned_queries(shape, sequences)
    pool = pool_of(shape, sequences, [0])
    wide = torch.cat((query, query), dim=-1)[..., : shape.head_size]
    assert not wide.is_contiguous()
    expected = run(query, pool, sequences, Rules())
    assert torch.equal(run(wide, pool, sequences, Rules()), expected)


def test_queries_at_any_positions_of_their_row() -> None:
    """A row of draft tokens is a few positions in any order, with padding anywhere."""
    torch.manual_seed(3)
    shape = Shape()
    sequence = random_sequence(shape, 11, 0, 0)
    scattered = Sequence(sequence.keys, sequence.values, (6, -1, 10, 2))
    check(shape, [scattered], Rules())
    check(shape, [scattered], Rules(window=3))


def test_captures_with_the_shape_of_its_query() -> None:
    fake = torch.empty(6, 4, 8, device="meta")
    pool, table = torch.empty(3, 2, 4, 16, device="meta"), torch.empty(6, 1, device="meta")
    output = torch.ops.rbln.paged_attention(
        fake, pool, table, torch.empty(6, device="meta"), 1.0, 0, 0.0, None, None
    )
    assert output.shape == fake.shape
    assert output.dtype == fake.dtype
