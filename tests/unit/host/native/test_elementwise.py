# SPDX-License-Identifier: Apache-2.0
"""Fused expressions and copies against torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import elementwise
from rbln_host.ops.elementwise import BINARY, MAX_DEPTH, UNARY, result_dtype
from tests.unit.host.native.programs import (
    ABSOLUTE,
    DTYPES,
    INDEX_DTYPES,
    RELATIVE,
    Op,
    assert_near,
    assert_same_bits,
    blank,
    random,
    run,
    spread,
)
from tests.unit.host.native.strategies import each_dtype, each_level, layouts, many, placed, seeds

SPECIAL: tuple[float, ...] = (0.0, -0.0, 1.0, -1.0, 1e-3, -1e-3, 0.62, 0.63, -0.7, 5.0, -5.0)
SPECIAL += (20.0, -20.0, 60.0, -60.0)
SPECIAL += (87.0, -87.0, 89.0, -89.0, 120.0, -120.0, 6e4, -6e4, math.inf, -math.inf, math.nan)
SPECIAL += (2**-24, -(2**-24), 2**-130, -(2**-130))
"""Both signs of zero, ends of polynomials' ranges, overflow, denormals, infinities, NaN."""
CALM_UNARY = ("neg", "abs", "tanh", "sigmoid", "sin", "cos", "relu", "silu", "gelu", "gelu_tanh")
CALM_BINARY = ("add", "sub", "mul", "maximum", "minimum")
"""Operators that enlarge an error little, so that an expression of them has a known tolerance."""


@st.composite
def axes(draw: st.DrawFn) -> tuple[int, ...]:
    leading = draw(st.lists(st.integers(0, 3), max_size=4))
    return (*leading, draw(st.sampled_from((0, 1, 2, 5, 15, 16, 17, 33))))


@st.composite
def programs(draw: st.DrawFn, inputs: int) -> str:
    """A well-formed expression that uses every input at least once."""
    words, depth = [], 0
    left = list(range(inputs))
    while left or depth > 1:
        if left and depth < MAX_DEPTH and (depth < 2 or draw(st.booleans())):
            words.append(f"i{left.pop()}")
            depth += 1
        elif depth > 1:
            words.append(draw(st.sampled_from(CALM_BINARY)))
            depth -= 1
        for word in draw(st.lists(st.sampled_from((*CALM_UNARY, "const")), max_size=2)):
            words.extend(["c0.75", "mul"] if word == "const" and depth < MAX_DEPTH else [])
            words.extend([word] if word != "const" else [])
    return " ".join(words)


@st.composite
def broadcast_inputs(draw: st.DrawFn, shape: tuple[int, ...], seed: int) -> Tensor:
    """Expanded along some axes, of any dtype and strides."""
    kept = [size if draw(st.integers(0, 3)) else min(size, 1) for size in shape]
    values = random(seed, *kept, dtype=torch.float32).clamp(-1, 1)
    placed_values = spread(
        values.to(draw(st.sampled_from(DTYPES))), **draw(layouts(len(shape), last_free=True))
    )
    return placed_values.expand(shape)


@each_level
@many
@given(st.data(), seeds, axes(), st.integers(1, 8))
def test_expressions(
    isa: str, data: st.DataObject, seed: int, shape: tuple[int, ...], count: int
) -> None:
    program = data.draw(programs(count))
    inputs = [data.draw(broadcast_inputs(shape, seed + i)) for i in range(count)]
    exact = elementwise([tensor.float() for tensor in inputs], program)
    dtype = result_dtype(inputs)
    out = placed(data.draw, blank(shape, dtype), last_free=True)
    run(Op("elementwise", [*inputs, out], text=program), isa)
    assert_near(out, exact, scale=32)


@each_level
@each_dtype
@pytest.mark.parametrize("word", UNARY)
def test_one_operand(isa: str, dtype: torch.dtype, word: str) -> None:
    special = torch.tensor(SPECIAL, dtype=torch.float32).to(dtype)
    x = spread(torch.cat((special, random(1, 500, dtype=dtype) * 3)))
    out = blank(x.shape, dtype)
    run(Op("elementwise", [x, out], text=f"i0 {word}"), isa)
    exact = UNARY[word](x.double()).float().to(dtype)
    same_end(out, exact)


@each_level
def test_gelu_of_every_size(isa: str) -> None:
    """The distribution function's share is exact to 3e-7, on both sides of 0 and far out."""
    x = torch.linspace(-12, 12, 48001)
    out = blank(x.shape, torch.float32)
    run(Op("elementwise", [x, out], text="i0 gelu"), isa)
    exact = UNARY["gelu"](x.double())
    assert bool(((out - exact).abs() <= 3e-7 * x.abs() + 1e-12).all())


@each_level
@each_dtype
@pytest.mark.parametrize("word", BINARY)
def test_two_operands(isa: str, dtype: torch.dtype, word: str) -> None:
    special = torch.tensor(SPECIAL, dtype=torch.float32).to(dtype)
    left = spread(special[:, None].expand(-1, len(SPECIAL)))
    right = special[None, :].expand(len(SPECIAL), -1)
    out = blank(left.shape, dtype)
    run(Op("elementwise", [left, right, out], text=f"i0 i1 {word}"), isa)
    same_end(out, BINARY[word](left.float(), right.float()).to(dtype))


def same_end(output: Tensor, exact: Tensor) -> None:
    """Near, NaN where NaN, and infinite with the same sign where infinite. What is tiny may be 0
    or a denormal."""
    assert torch.equal(output.isnan(), exact.isnan())
    assert torch.equal(output.isinf(), exact.isinf())
    torch.testing.assert_close(
        output.float(),
        exact.float(),
        rtol=RELATIVE[output.dtype] * (1 if output.dtype != torch.float32 else 0.2),
        atol=ABSOLUTE / 4,
        equal_nan=True,
    )


@each_level
def test_signs_of_zero(isa: str) -> None:
    """A division shows them."""
    x = torch.tensor([0.0, -0.0])
    for program, expected in (
        ("c1.0 i0 div", [math.inf, -math.inf]),
        ("c1.0 i0 neg div", [-math.inf, math.inf]),
        ("c1.0 i0 abs div", [math.inf, math.inf]),
        ("c1.0 i0 sqrt div", [math.inf, -math.inf]),
    ):
        out = blank((2,), torch.float32)
        run(Op("elementwise", [x, out], text=program), isa)
        assert out.tolist() == expected, program


@each_level
def test_constants(isa: str) -> None:
    for text, value in (
        ("c1.5", 1.5),
        ("c-2e-05", -2e-05),
        ("cinf", math.inf),
        ("c-inf", -math.inf),
        ("c1e+300", math.inf),
        ("c16777217.0", 16777216.0),
    ):
        out = blank((3,), torch.float32)
        run(Op("elementwise", [out], text=text), isa)
        assert out.tolist() == [pytest.approx(value)] * 3


@each_level
@each_dtype
def test_in_place(isa: str, dtype: torch.dtype) -> None:
    x = spread(random(1, 3, 50, dtype=dtype))
    exact = x.float() * 2 + 1
    run(Op("elementwise", [x, x], text="i0 c2.0 mul c1.0 add"), isa)
    assert_near(x, exact)


ALL = (*DTYPES, *INDEX_DTYPES)


def copied(isa: str, source: Tensor, target: Tensor) -> None:
    run(Op("copy", [source, target]), isa)


@each_level
@many
@given(st.data(), seeds, axes())
def test_copies(isa: str, data: st.DataObject, seed: int, shape: tuple[int, ...]) -> None:
    source, target = data.draw(st.sampled_from(ALL)), data.draw(st.sampled_from(ALL))
    kept = [size if data.draw(st.integers(0, 3)) else min(size, 1) for size in shape]
    values = (random(seed, *kept, dtype=torch.float32) * 1000).to(source)
    x = placed(data.draw, values, last_free=True).expand(shape)
    out = placed(data.draw, blank(shape, target), last_free=True)
    copied(isa, x, out)
    assert_same_bits(out, x.to(target))


@each_level
@each_dtype
def test_copy_keeps_bits(isa: str, dtype: torch.dtype) -> None:
    """Also those of NaNs."""
    count = 1 << 16
    integers = torch.arange(count, dtype=torch.int32).to(torch.int16)
    x = integers.view(dtype) if dtype != torch.float32 else integers.view(torch.float32)
    for strided in (x, x.view(2, -1).T):
        out = blank(strided.shape, dtype)
        copied(isa, strided, out)
        assert_same_bits(out, strided)


@each_level
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_every_half_survives_float32(isa: str, half: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(half)
    wide, back = blank(x.shape, torch.float32), blank(x.shape, half)
    copied(isa, x, wide)
    assert torch.equal(wide.nan_to_num(7.0), x.float().nan_to_num(7.0))
    assert torch.equal(wide.isnan(), x.isnan())
    copied(isa, wide, back)
    real = ~x.isnan() & ~flushed(isa, wide, half)
    assert_same_bits(back[real], x[real])
    assert torch.equal(back.isnan(), x.isnan())


@each_level
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_float32_rounds_to_nearest_even(isa: str, half: torch.dtype) -> None:
    """Around every half's neighbours' midpoint, denormals and overflow included."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(half)
    wide = x[x.isfinite()].float()
    up = torch.nextafter(wide, torch.tensor(math.inf))
    middle = (wide + torch.cat((wide[1:], wide[-1:]))) / 2
    values = torch.cat((wide, up, middle, torch.nextafter(middle, torch.tensor(-math.inf))))
    values = torch.cat((values, torch.tensor([65519.99, 65520.0, 3.3e38, 3.4e38, 1e-45])))
    for strided in (values, torch.stack((values, values), dim=1)[:, 0]):
        out = blank(strided.shape, half)
        copied(isa, strided, out)
        kept = ~flushed(isa, strided, half)
        assert_same_bits(out[kept], strided[kept].to(half))
        assert not out[~kept].float().abs().gt(2**-126).any()


def flushed(isa: str, values: Tensor, half: torch.dtype) -> Tensor:
    """Which float32 the level may round to zero: vcvtneps2bf16 takes denormals for zeros."""
    denormal = values.abs() < 2**-126
    return denormal & (isa == "avx512_bf16" and half == torch.bfloat16)


@each_level
def test_integers(isa: str) -> None:
    edges = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**40 + 3, 2**63 - 1, -(2**63)])
    for target in ALL:
        out = blank(edges.shape, target)
        copied(isa, edges, out)
        assert_same_bits(out, edges.to(target))
    whole = torch.tensor([0.0, -0.9, 1.9, -2.5, 1e9])
    for target in INDEX_DTYPES:
        out = blank(whole.shape, target)
        copied(isa, whole, out)
        assert out.tolist() == whole.to(target).tolist()
