# SPDX-License-Identifier: Apache-2.0
"""The matrix kernels against their eager references in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.pack import pack
from rbln_host.ops import ACTIVATIONS, gated_linear, linear
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

activations = st.sampled_from(ACTIVATIONS)


@each_level
@each_dtype
@few
@given(st.data())
def test_linear(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, activation = data.draw(seeds), data.draw(activations)
    count, width, columns = data.draw(rows), data.draw(widths), data.draw(widths)
    x = placed(data.draw, random(seed, count, width, dtype=dtype))
    weight = weight_of(seed + 1, columns, width, dtype=dtype)
    bias = spread(random(seed + 2, columns, dtype=dtype)) if data.draw(st.booleans()) else None
    residual = None
    if data.draw(st.booleans()):
        residual = placed(data.draw, random(seed + 3, count, columns, dtype=dtype))
    out = placed(data.draw, blank((count, columns), dtype))
    run(Op("linear", [x, poisoned_pack(weight), bias, residual, out], text=activation), isa)
    exact = linear(x.float(), weight.float(), single(bias), single(residual), activation)
    assert_near(out, exact, scale=4)


@each_level
@each_dtype
@few
@given(st.data())
def test_gated_linear(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, activation = data.draw(seeds), data.draw(activations)
    count, width = data.draw(rows), data.draw(widths)
    columns = data.draw(st.sampled_from((16, 32, 48, 64, 112)))
    x = placed(data.draw, random(seed, count, width, dtype=dtype))
    weight = weight_of(seed + 1, 2 * columns, width, dtype=dtype)
    bias = spread(random(seed + 2, 2 * columns, dtype=dtype)) if data.draw(st.booleans()) else None
    out = placed(data.draw, blank((count, columns), dtype))
    run(Op("gated_linear", [x, poisoned_pack(weight), bias, out], text=activation), isa)
    exact = gated_linear(x.float(), weight.float(), single(bias), activation)
    assert_near(out, exact, scale=16)


@each_level
@each_dtype
def test_columns_of_many_tasks(isa: str, dtype: torch.dtype) -> None:
    """Wide enough that a task does not hold all columns, and the last holds fewer."""
    for count in (1, 13):
        x, residual = random(1, count, 700, dtype=dtype), random(3, count, 1000, dtype=dtype)
        weight = weight_of(2, 1000, 700, dtype=dtype)
        out = blank((count, 1000), dtype)
        run(Op("linear", [x, poisoned_pack(weight), None, residual, out], text="none"), isa)
        exact = linear(x.float(), weight.float(), None, residual.float(), "none")
        assert_near(out, exact, scale=4)
        gated = blank((count, 496), dtype)
        run(Op("gated_linear", [x, poisoned_pack(weight[:992]), None, gated], text="silu"), isa)
        exact = gated_linear(x.float(), weight[:992].float(), None, "silu")
        assert_near(gated, exact, scale=4)


@each_level
@each_dtype
def test_output_over_its_residual(isa: str, dtype: torch.dtype) -> None:
    x, weight = random(1, 5, 40, dtype=dtype), weight_of(2, 50, 40, dtype=dtype)
    residual = random(3, 5, 50, dtype=dtype)
    out = spread(residual)
    run(Op("linear", [x, pack(weight), None, out, out], text="none"), isa)
    assert_near(out, linear(x.float(), weight.float(), None, residual.float(), "none"), scale=4)


@each_level
@each_dtype
def test_no_rows(isa: str, dtype: torch.dtype) -> None:
    weight = pack(weight_of(1, 32, 8, dtype=dtype))
    x = torch.empty(0, 8, dtype=dtype)
    run(Op("linear", [x, weight, None, None, torch.empty(0, 32, dtype=dtype)], text="none"), isa)
    run(Op("gated_linear", [x, weight, None, torch.empty(0, 16, dtype=dtype)], text="silu"), isa)


@each_level
@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_alone(isa: str, dtype: torch.dtype, value: float) -> None:
    """Rows of padding may hold anything."""
    x, weight = random(1, 13, 40, dtype=dtype), weight_of(2, 32, 40, dtype=dtype)
    results = []
    for row in (x[4].clone(), torch.full_like(x[4], value)):
        x[4] = row
        out, gated = blank((13, 32), dtype), blank((13, 16), dtype)
        run(Op("linear", [x, pack(weight), None, None, out], text="none"), isa)
        run(Op("gated_linear", [x, pack(weight), None, gated], text="silu"), isa)
        results.append((out, gated))
    for finite, other in zip(*results, strict=True):
        assert not other[4].isfinite().any()
        assert_same_bits(finite[:4], other[:4])
        assert_same_bits(finite[5:], other[5:])


@each_level
@each_dtype
def test_rounded_once(isa: str, dtype: torch.dtype) -> None:
    """In bf16 257 rounds to 256 and in fp16 2049 to 2048: so the residual must be added before."""
    size = {torch.bfloat16: 257, torch.float16: 2049, torch.float32: 100}[dtype]
    ones = torch.ones(1, size, dtype=dtype)
    out = blank((1, 1), dtype)
    residual = torch.tensor([[1.0 - size]], dtype=dtype)
    run(Op("linear", [ones, pack(ones), None, residual, out], text="none"), isa)
    assert out.item() == 1.0


@each_level
@each_dtype
@few
@given(st.data())
def test_a_row_is_computed_alike_alone(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Bit for bit, whatever rows are computed with it and wherever it lies among them."""
    seed, count, width = data.draw(seeds), data.draw(rows), data.draw(widths)
    columns = data.draw(st.sampled_from((16, 48, 96)))
    gated = columns == 96 and data.draw(st.booleans())
    x = random(seed, count, width, dtype=dtype)
    weight, bias = (
        pack(weight_of(seed + 1, columns, width, dtype=dtype)),
        random(2, columns, dtype=dtype),
    )

    def rows_of(some: Tensor) -> Tensor:
        out = blank((len(some), columns // 2 if gated else columns), dtype)
        if gated:
            run(Op("gated_linear", [some, weight, bias, out], text="silu"), isa)
        else:
            run(Op("linear", [some, weight, bias, None, out], text="gelu"), isa)
        return out

    together = rows_of(x)
    for row in {0, count // 2, count - 1}:
        assert_same_bits(rows_of(x[row : row + 1]), together[row : row + 1])
    part = slice(count // 3, count // 3 + max(1, count // 2))
    assert_same_bits(rows_of(x[part]), together[part])
