# SPDX-License-Identifier: Apache-2.0
"""The kernels of mixtures of experts against their eager references in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.pack import pack
from rbln_host.ops import ACTIVATIONS, combine_experts, gated_experts, route
from tests.unit.host.native.programs import (
    Op,
    assert_near,
    assert_same_bits,
    blank,
    poisoned_pack,
    random,
    run,
    single,
    spread,
    weight_of,
)
from tests.unit.host.native.strategies import (
    each_dtype,
    each_level,
    few,
    placed,
    rows,
    seeds,
    widths,
)

counts = st.sampled_from((1, 2, 3, 8))
"""Experts there are."""
inners = st.sampled_from((16, 32, 48, 112))


def experts_of(
    seed: int, tokens: int, choices: int, experts: int, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Different ones for each token where there are enough; now and then one that is none."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, max(experts, choices), generator=generator).argsort(dim=-1)
    chosen = order[:, :choices]
    chosen[chosen >= experts] = -1
    if tokens > 4:
        chosen[3, 0] = 1 << 30
    return spread(chosen.to(dtype), gaps=[1, 3])


class TestRoute:
    @each_level
    @each_dtype
    @few
    @given(st.data())
    def test_equals_the_reference(self, isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
        tokens, experts = data.draw(rows), data.draw(widths)
        top_k = data.draw(
            st.sampled_from(sorted({1, (experts + 1) // 2, min(8, experts), experts}))
        )
        renormalise = data.draw(st.booleans())
        logits = placed(data.draw, 4 * random(data.draw(seeds), tokens, experts, dtype=dtype))
        weights = placed(data.draw, blank((tokens, top_k), dtype))
        chosen = placed(data.draw, blank((tokens, top_k), torch.int64), last_free=True)
        run(Op("route", [logits, weights, chosen], {"renormalise": renormalise}), isa)
        exact, expected = route(logits.float(), top_k, renormalise)
        assert torch.equal(chosen, expected)  # of equal logits the first, in order
        assert_near(weights, exact)

    @each_level
    @each_dtype
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_rows_of_padding(self, isa: str, dtype: torch.dtype, value: float) -> None:
        """Whatever they hold, experts that exist are chosen, each once; no other row differs."""
        logits = random(1, 9, 20, dtype=dtype)
        for spoilt in (slice(0, 20), slice(3, 5), slice(19, 20)):
            logits[4] = random(2, 20, dtype=dtype)
            logits[4, spoilt] = value
            weights, chosen = blank((9, 6), dtype), blank((9, 6), torch.int64)
            run(Op("route", [logits, weights, chosen], {"renormalise": 1}), isa)
            assert torch.equal(chosen, route(logits, 6, True)[1])
            assert all(len(set(row)) == 6 for row in chosen.tolist())
            assert weights[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()

    def test_the_two_ways_to_renormalise(self) -> None:
        """Softmax, choose and divide; or choose, then softmax: they are the same."""
        logits = random(1, 6, 16, dtype=torch.float32)
        weights, experts = route(logits, 4, True)
        chosen = logits.softmax(dim=-1).topk(4)
        assert torch.equal(experts, chosen.indices)
        torch.testing.assert_close(weights, chosen.values / chosen.values.sum(-1, keepdim=True))
        torch.testing.assert_close(weights, logits.topk(4).values.softmax(dim=-1))
        torch.testing.assert_close(route(logits, 4, False)[0], chosen.values)


@each_level
@each_dtype
@few
@given(st.data())
def test_gated_experts(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, activation = data.draw(seeds), data.draw(st.sampled_from(ACTIVATIONS))
    tokens, width, inner = data.draw(rows), data.draw(widths), data.draw(inners)
    experts, choices = data.draw(counts), data.draw(st.integers(1, 3))
    rule = {
        "limit": data.draw(st.sampled_from((0.0, 0.75))),
        "offset": data.draw(st.integers(0, 1)),
    }
    x = placed(data.draw, random(seed, tokens, width, dtype=dtype))
    weight = weight_of(seed + 1, experts, 2 * inner, width, dtype=dtype)
    bias = None
    if data.draw(st.booleans()):
        bias = placed(data.draw, random(seed + 2, experts, 2 * inner, dtype=dtype))
    index_dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    chosen = experts_of(seed + 3, tokens, choices, experts, index_dtype)
    out = placed(data.draw, blank((tokens, choices, inner), dtype))
    run(Op("gated_experts", [x, pack(weight), bias, chosen, out], rule, activation), isa)
    exact = gated_experts(
        x.float(), weight.float(), single(bias), chosen, activation, rule["limit"], rule["offset"]
    )
    assert_near(out, exact, scale=16)


@each_level
@each_dtype
@few
@given(st.data())
def test_combine_experts(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, tokens, width, columns = (data.draw(s) for s in (seeds, rows, widths, widths))
    experts, choices = data.draw(counts), data.draw(st.integers(1, 3))
    x = placed(data.draw, random(seed, tokens, choices, width, dtype=dtype))
    weight = weight_of(seed + 1, experts, columns, width, dtype=dtype)
    bias = None
    if data.draw(st.booleans()):
        bias = placed(data.draw, random(seed + 2, experts, columns, dtype=dtype))
    chosen = experts_of(seed + 3, tokens, choices, experts)
    weights = placed(data.draw, random(seed + 4, tokens, choices, dtype=dtype))
    out = placed(data.draw, blank((tokens, columns), dtype))
    run(Op("combine_experts", [x, poisoned_pack(weight), bias, chosen, weights, out]), isa)
    exact = combine_experts(x.float(), weight.float(), single(bias), chosen, weights.float())
    assert_near(out, exact, scale=16)


@each_level
@each_dtype
def test_several_tasks_of_an_expert(isa: str, dtype: torch.dtype) -> None:
    """Wide enough that a task does not hold all columns of an expert, and the last holds fewer."""
    x, weight = random(1, 20, 900, dtype=dtype), weight_of(2, 3, 2 * 176, 900, dtype=dtype)
    chosen, out = experts_of(3, 20, 2, 3), blank((20, 2, 176), dtype)
    rule = {"limit": 0.0, "offset": 0.0}
    run(Op("gated_experts", [x, pack(weight), None, chosen, out], rule, "silu"), isa)
    exact = gated_experts(x.float(), weight.float(), None, chosen, "silu", 0.0, 0.0)
    assert_near(out, exact, scale=8)


def moe(x: Tensor, logits: Tensor, weights: tuple[Tensor, Tensor], isa: str) -> Tensor:
    """All three commands one after the other, two of each token's experts."""
    dtype, tokens = x.dtype, len(x)
    shares, chosen = blank((tokens, 2), dtype), blank((tokens, 2), torch.int64)
    inner, columns = weights[0].shape[1] // 2, weights[1].shape[1]
    between, out = blank((tokens, 2, inner), dtype), blank((tokens, columns), dtype)
    rule = {"limit": 2.0, "offset": 1.0}
    run(Op("route", [logits, shares, chosen], {"renormalise": 1}), isa)
    first, second = map(pack, weights)
    run(Op("gated_experts", [x, first, None, chosen, between], rule, "quick_gelu"), isa)
    run(Op("combine_experts", [between, second, None, chosen, shares, out]), isa)
    return out


@each_level
@each_dtype
@few
@given(st.data())
def test_a_row_is_computed_alike_alone(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Bit for bit, whatever rows are computed with it and however many share its experts."""
    seed, tokens, width, experts = (data.draw(s) for s in (seeds, rows, widths, counts))
    experts = max(2, experts)
    x, logits = random(seed, tokens, width, dtype=dtype), random(1, tokens, experts, dtype=dtype)
    weights = (
        weight_of(seed + 1, experts, 96, width, dtype=dtype),
        weight_of(seed + 2, experts, 50, 48, dtype=dtype),
    )
    together = moe(x, logits, weights, isa)
    for row in {0, tokens // 2, tokens - 1}:
        one = slice(row, row + 1)
        assert_same_bits(moe(x[one], logits[one], weights, isa), together[one])


@each_level
@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_alone(isa: str, dtype: torch.dtype, value: float) -> None:
    """Rows of padding may hold anything, in their logits too."""
    x, logits = random(1, 13, 40, dtype=dtype), random(2, 13, 4, dtype=dtype)
    weights = weight_of(3, 4, 64, 40, dtype=dtype), weight_of(4, 4, 40, 32, dtype=dtype)
    finite = moe(x, logits, weights, isa)
    x[4], logits[4] = value, value
    other = moe(x, logits, weights, isa)
    assert not other[4].isfinite().any()
    assert_same_bits(finite[:4], other[:4])
    assert_same_bits(finite[5:], other[5:])


@each_level
@each_dtype
def test_rounded_once(isa: str, dtype: torch.dtype) -> None:
    """In bf16 257 rounds to 256 and in fp16 2049 to 2048: so sums stay in fp32 to the end."""
    size = {torch.bfloat16: 257.0, torch.float16: 2049.0, torch.float32: 100.0}[dtype]
    high, low = size - 1, 1.0
    weight = torch.tensor([[[high, low]], [[-high, 0.0]]], dtype=dtype)
    x = torch.ones(1, 2, 2, dtype=dtype)
    shares, chosen = torch.ones(1, 2, dtype=dtype), torch.tensor([[1, 0]])
    out = blank((1, 1), dtype)
    run(Op("combine_experts", [x, pack(weight), None, chosen, shares, out]), isa)
    assert out.item() == 1.0


@each_level
@each_dtype
def test_only_experts_with_rows_are_read(isa: str, dtype: torch.dtype) -> None:
    """The others' weights are not finite and change nothing."""
    x, logits = random(1, 5, 40, dtype=dtype), random(2, 5, 2, dtype=dtype)
    weights = [weight_of(3, 4, 64, 40, dtype=dtype), weight_of(4, 4, 40, 32, dtype=dtype)]
    some = torch.cat((logits, torch.full((5, 2), -10.0, dtype=dtype)), dim=-1)
    expected = moe(x, some, (weights[0], weights[1]), isa)
    for weight in weights:
        weight[2:] = torch.nan
    assert_same_bits(moe(x, some, (weights[0], weights[1]), isa), expected)


@each_level
@each_dtype
def test_no_rows_and_no_experts(isa: str, dtype: torch.dtype) -> None:
    weight, rule = pack(weight_of(1, 2, 32, 8, dtype=dtype)), {"limit": 0.0, "offset": 0.0}
    for tokens in (0, 3):
        none = torch.full((tokens, 2), -1)
        x, between = torch.empty(tokens, 8, dtype=dtype), blank((tokens, 2, 16), dtype)
        run(Op("gated_experts", [x, weight, None, none, between], rule, "silu"), isa)
        assert torch.equal(between, torch.zeros_like(between))
        rows_in, out = torch.ones(tokens, 2, 8, dtype=dtype), blank((tokens, 32), dtype)
        shares = torch.ones(tokens, 2, dtype=dtype)
        run(Op("combine_experts", [rows_in, weight, None, none, shares, out]), isa)
        assert torch.equal(out, torch.zeros_like(out))
