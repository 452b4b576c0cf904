# SPDX-License-Identifier: Apache-2.0
"""Norms, gated activations, embeddings and argmax against their eager references in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.pack import pack
from rbln_host.ops import ACTIVATIONS, fused_add_rms_norm, gated_activation, layer_norm, rms_norm
from tests.unit.host.native.programs import (
    INDEX_DTYPES,
    Op,
    assert_near,
    assert_same_bits,
    blank,
    random,
    run,
    single,
    spread,
)
from tests.unit.host.native.strategies import (
    Draw,
    each_dtype,
    each_level,
    few,
    placed,
    seeds,
    shapes,
    widths,
)

epsilons = st.sampled_from((1e-6, 1e-5, 0.1))


def optional(draw: Draw, tensor: Tensor) -> Tensor | None:
    return spread(tensor) if draw(st.booleans()) else None


@each_level
@each_dtype
@few
@given(st.data())
def test_rms_norm(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, shape, epsilon = data.draw(seeds), data.draw(shapes()), data.draw(epsilons)
    width = shape[-1]
    x = placed(data.draw, random(seed, *shape, dtype=dtype))
    weight_dtype = data.draw(st.sampled_from((dtype, torch.float32)))
    weight = optional(data.draw, random(seed + 1, width, dtype=weight_dtype))
    out = placed(data.draw, blank(shape, dtype))
    measured = data.draw(st.integers(0, width))
    numbers = {"epsilon": epsilon, "variance_size": measured}
    if data.draw(st.booleans()):
        run(Op("rms_norm", [x, weight, out], numbers), isa)
        assert_near(out, rms_norm(x.float(), single(weight), epsilon, measured), scale=10)
        return
    residual = placed(data.draw, random(seed + 2, *shape, dtype=dtype))
    total = placed(data.draw, blank(shape, dtype))
    run(Op("add_rms_norm", [x, residual, weight, out, total], numbers), isa)
    normed, added = fused_add_rms_norm(
        x.float(), residual.float(), single(weight), epsilon, measured
    )
    assert_near(out, normed, scale=10)
    assert_near(total, added)


@each_level
@each_dtype
@few
@given(st.data())
def test_layer_norm(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    seed, shape, epsilon = data.draw(seeds), data.draw(shapes()), data.draw(epsilons)
    width = shape[-1]
    x = placed(data.draw, random(seed, *shape, dtype=dtype))
    weight = optional(data.draw, random(seed + 1, width, dtype=dtype))
    bias = optional(data.draw, random(seed + 2, width, dtype=dtype))
    out = placed(data.draw, blank(shape, dtype))
    run(Op("layer_norm", [x, weight, bias, out], {"epsilon": epsilon}), isa)
    assert_near(out, layer_norm(x.float(), single(weight), single(bias), epsilon), scale=10)


@each_level
@each_dtype
def test_norms_in_place(isa: str, dtype: torch.dtype) -> None:
    values, weight = random(1, 5, 70, dtype=dtype), random(2, 70, dtype=dtype)
    residual = random(3, 5, 70, dtype=dtype)
    numbers = {"epsilon": 1e-5, "variance_size": 0}
    x = spread(values)
    run(Op("rms_norm", [x, weight, x], numbers), isa)
    assert_near(x, rms_norm(values.float(), weight.float(), 1e-5, 0))
    x, total = spread(values), spread(residual)
    run(Op("add_rms_norm", [x, total, weight, x, total], numbers), isa)
    normed, added = fused_add_rms_norm(values.float(), residual.float(), weight.float(), 1e-5, 0)
    assert_near(x, normed)
    assert_near(total, added)
    x = spread(values)
    run(Op("layer_norm", [x, weight, None, x], {"epsilon": 1e-5}), isa)
    assert_near(x, layer_norm(values.float(), weight.float(), None, 1e-5))


@each_level
@each_dtype
@few
@given(st.data(), st.sampled_from(("rms", "add", "layer")))
def test_a_row_is_normalised_alike_alone(
    isa: str, dtype: torch.dtype, data: st.DataObject, norm: str
) -> None:
    seed, count, width = data.draw(seeds), data.draw(st.integers(2, 40)), data.draw(widths)
    x, residual = random(seed, count, width, dtype=dtype), random(1, count, width, dtype=dtype)
    weight = random(seed + 1, width, dtype=dtype)
    numbers = {"epsilon": 1e-5, "variance_size": 0}

    def normed(some: Tensor, others: Tensor) -> Tensor:
        out, total = blank(some.shape, dtype), blank(some.shape, dtype)
        if norm == "rms":
            run(Op("rms_norm", [some, weight, out], numbers), isa)
        elif norm == "add":
            run(Op("add_rms_norm", [some, others, weight, out, total], numbers), isa)
        else:
            run(Op("layer_norm", [some, weight, None, out], {"epsilon": 1e-5}), isa)
        return out

    together = normed(x, residual)
    for row in {0, count // 2, count - 1}:
        part = slice(row, row + 1)
        assert_same_bits(normed(x[part], residual[part]), together[part])


@each_level
@each_dtype
@few
@given(st.data(), st.sampled_from(ACTIVATIONS))
def test_gated_activation(
    isa: str, dtype: torch.dtype, data: st.DataObject, activation: str
) -> None:
    seed, shape = data.draw(seeds), data.draw(shapes())
    *leading, width = shape
    x = placed(data.draw, random(seed, *leading, 2 * width, dtype=dtype))
    out = placed(data.draw, blank(shape, dtype))
    run(Op("gated_activation", [x, out], text=activation), isa)
    assert_near(out, gated_activation(x.float(), activation), scale=4)


@each_level
@each_dtype
@few
@given(st.data(), st.booleans())
def test_embedding(isa: str, dtype: torch.dtype, data: st.DataObject, packed: bool) -> None:
    seed, count, width = data.draw(seeds), data.draw(st.integers(1, 40)), data.draw(widths)
    tokens = data.draw(st.integers(0, 20))
    table = random(seed, count, width, dtype=dtype)
    index_dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, count, (tokens,), generator=generator).to(index_dtype)
    out = placed(data.draw, blank((tokens, width), dtype))
    stored = spread(pack(table)) if packed else placed(data.draw, table)
    numbers = {"packed": float(packed), "rows": float(count), "width": float(width)}
    run(Op("embedding", [stored, placed(data.draw, ids, last_free=True), out], numbers), isa)
    assert_same_bits(out, table[ids.long()])


@each_level
@each_dtype
@few
@given(st.data())
def test_argmax(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Of equal elements the first counts; of so few values many are equal."""
    seed, count, width = data.draw(seeds), data.draw(st.integers(0, 6)), data.draw(widths)
    values = random(seed, count, width, dtype=torch.float32).mul(2).round().to(dtype)
    if count and data.draw(st.booleans()):
        for column in data.draw(st.lists(st.integers(0, width - 1), max_size=3)):
            values[0, column] = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    x = placed(data.draw, values)
    out = placed(data.draw, blank((count,), torch.int64), last_free=True)
    run(Op("argmax", [x, out]), isa)
    assert out.tolist() == [first_largest(row) for row in values.tolist()]


def first_largest(values: list[float]) -> int:
    """As torch counts: a NaN is larger than everything."""
    ranks = [math.inf if math.isnan(value) else value for value in values]
    nans = [at for at, value in enumerate(values) if math.isnan(value)]
    return nans[0] if nans else ranks.index(max(ranks))


@each_level
@each_dtype
@pytest.mark.parametrize("width", [1, 16, 17, 40])
def test_argmax_of_extremes(isa: str, dtype: torch.dtype, width: int) -> None:
    lowest = torch.full((1, width), -math.inf, dtype=dtype)
    nans = torch.full((1, width), math.nan, dtype=dtype)
    last = torch.full((1, width), -1.0, dtype=dtype)
    last[0, -1] = -0.5
    for values, expected in ((lowest, 0), (nans, 0), (last, width - 1)):
        out = blank((1,), torch.int64)
        run(Op("argmax", [spread(values), out]), isa)
        assert out.item() == expected


@each_level
@each_dtype
def test_argmax_is_torchs(isa: str, dtype: torch.dtype) -> None:
    x = random(5, 9, 1000, dtype=dtype)
    x[2, 700], x[2, 300], x[3, 999] = math.nan, math.inf, math.inf
    out = blank((9,), torch.int64)
    run(Op("argmax", [x, out]), isa)
    assert torch.equal(out, x.argmax(dim=-1))
