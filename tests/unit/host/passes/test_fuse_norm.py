# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms written out, and norms of sums."""

from typing import Any

import pytest
import torch

from rbln_host.compiler.passes import fold_weights, fuse_norm
from tests.unit.host.passes.build import Build, text

ROUND_ONCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


def build(dtype: torch.dtype, *, weight: torch.dtype | None = None) -> Build:
    b = Build(dtype, x=(3, 8), y=(3, 8))
    b.weight("w", 8, dtype=weight)
    return b


def normed(b: Build, hidden: str = "x", *, wide: bool = True, square: str = "pow") -> None:
    """``normed`` in fp32, as Hugging Face writes it."""
    source = hidden
    if wide:
        b("h = to.dtype", hidden, torch.float32)
        source = "h"
    calls: dict[str, tuple[Any, ...]] = {
        "pow": ("s = pow.Tensor_Scalar", source, 2),
        "mul": ("s = mul.Tensor", source, source),
    }
    b(*calls[square])
    b("m = mean.dim", "s", [-1], True)
    b("e = add.Tensor", "m", 1e-5)
    b("r = rsqrt", "e")
    b("normed = mul.Tensor", source, "r")


@pytest.mark.parametrize("square", ["pow", "mul"])
def test_llama(square: str) -> None:
    """``weight * normed.to(dtype)``: exactly what the operator computes."""
    b = build(torch.bfloat16)
    normed(b, square=square)
    b("n = to.dtype", "normed", torch.bfloat16)
    b("out = mul.Tensor", "w", "n")
    before = b.captured("out")
    after = fuse_norm(before)
    assert text(after) == ["out = rbln::rms_norm(x, w, 1e-05, 0)"]
    b.assert_same(before, after)


def test_gemma() -> None:
    """``(normed * (1 + weight.float())).to(dtype)``."""
    b = build(torch.bfloat16)
    normed(b)
    b("w32 = to.dtype", "w", torch.float32)
    b("w1 = add.Tensor", "w32", 1.0)
    b("scaled = mul.Tensor", "normed", "w1")
    b("out = to.dtype", "scaled", torch.bfloat16)
    before = b.captured("out")
    after = fuse_norm(fold_weights(before))
    assert text(after) == ["out = rbln::rms_norm(x, w_model.w@float32+1.0, 1e-05, 0)"]
    b.assert_same(before, after)


def test_in_fp32() -> None:
    b = build(torch.float32)
    normed(b, wide=False)
    b("out = mul.Tensor", "normed", "w")
    before = b.captured("out")
    after = fuse_norm(before)
    assert text(after) == ["out = rbln::rms_norm(x, w, 1e-05, 0)"]
    b.assert_same(before, after, 1e-6)


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
def test_without_a_weight(dtype: torch.dtype) -> None:
    b = build(dtype)
    normed(b, wide=dtype != torch.float32)
    if dtype != torch.float32:
        b("out = to.dtype", "normed", dtype)
    before = b.captured("normed" if dtype == torch.float32 else "out")
    after = fuse_norm(before)
    name = before.graph.outputs[0]
    assert text(after) == [f"{name} = rbln::rms_norm(x, None, 1e-05, 0)"]
    b.assert_same(before, after)


def test_with_a_square_root() -> None:
    b = build(torch.float32)
    b("s = pow.Tensor_Scalar", "x", 2.0)
    b("m = mean.dim", "s", [1], True)
    b("e = add.Tensor", "m", 1e-5)
    b("q = sqrt", "e")
    b("out = div.Tensor", "x", "q")
    before = b.captured("out")
    after = fuse_norm(before)
    assert text(after) == ["out = rbln::rms_norm(x, None, 1e-05, 0)"]
    b.assert_same(before, after, 1e-6)


def operators_left(b: Build, *outputs: str) -> list[str]:
    before = b.captured(*outputs)
    after = fuse_norm(before)
    b.assert_same(before, after, ROUND_ONCE[b.dtype])
    return [line for line in text(after) if "rms_norm" in line]


def test_a_part_that_is_read_elsewhere_stays() -> None:
    b = build(torch.float32)
    normed(b, wide=False)
    b("out = mul.Tensor", "normed", "w")
    assert operators_left(b, "out", "r") == []
    b = build(torch.float32)
    normed(b, wide=False)
    b("out = mul.Tensor", "normed", "w")
    assert operators_left(b, "out", "normed") == ["normed = rbln::rms_norm(x, None, 1e-05, 0)"]


def test_a_weight_of_a_wider_dtype_is_left_outside() -> None:
    """bf16 * fp32 is fp32, and the operator's result would be bf16."""
    b = build(torch.bfloat16, weight=torch.float32)
    normed(b)
    b("n = to.dtype", "normed", torch.bfloat16)
    b("out = mul.Tensor", "n", "w")
    assert operators_left(b, "out") == ["n = rbln::rms_norm(x, None, 1e-05, 0)"]


def test_a_weight_of_a_narrower_dtype_is_left_outside() -> None:
    """fp32 * bf16 is fp32; the operator would round to the weight's dtype before it."""
    b = build(torch.bfloat16)
    normed(b)
    b("out = mul.Tensor", "normed", "w")
    assert operators_left(b, "out") == ["normed = rbln::rms_norm(h, None, 1e-05, 0)"]


def test_a_scale_for_each_row_is_no_weight() -> None:
    b = Build(x=(3, 8), rows=(3, 1))
    normed(b, wide=False)
    b("out = mul.Tensor", "normed", "rows")
    assert operators_left(b, "out") == ["normed = rbln::rms_norm(x, None, 1e-05, 0)"]


def test_a_norm_divided_by_a_value_stays() -> None:
    b = build(torch.float32)
    normed(b, wide=False)
    b("out = div.Tensor", "normed", "w")
    assert operators_left(b, "out") == ["normed = rbln::rms_norm(x, None, 1e-05, 0)"]


@pytest.mark.parametrize(
    ("given", "inner", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_a_cast_to_another_dtype_than_before_the_norm_stays(
    given: torch.dtype, inner: torch.dtype, result: torch.dtype
) -> None:
    b = build(given)
    b("h = to.dtype", "x", inner)
    b("n = rbln::rms_norm", "h", None, 1e-5, 0)
    b("out = to.dtype", "n", result)
    before = b.captured("out")
    assert text(fuse_norm(before)) == text(before)


def test_doubles_stay() -> None:
    b = build(torch.float64)
    normed(b, wide=False)
    b("total = add.Tensor", "x", "y")
    b("n = rbln::rms_norm", "total", None, 1e-5, 0)
    before = b.captured("normed", "n")
    assert text(fuse_norm(before)) == text(before)


@pytest.mark.parametrize("place", [2, 6])
def test_nothing_is_fused_across_a_write(place: int) -> None:
    b = build(torch.bfloat16)
    normed(b)
    b("out = to.dtype", "normed", torch.bfloat16)
    b("_ = mul_.Tensor", "x" if place == 6 else "h", 2.0)
    b.commands.insert(place, b.commands.pop())
    before = b.captured("out")
    after = fuse_norm(before)
    assert not any("rms_norm(x" in line for line in text(after))
    b.assert_same(before, after, 1.6e-2)


def test_a_norm_whose_input_is_written_to_stays_in_its_place() -> None:
    b = build(torch.float32)
    b("n = rbln::rms_norm", "x", None, 1e-5, 0)
    b("_ = mul_.Tensor", "x", 2.0)
    b("out = mul.Tensor", "n", "w")
    before = b.captured("out")
    after = fuse_norm(before)
    assert text(after) == text(before)
    b.assert_same(before, after)


@pytest.mark.parametrize(
    ("exponent", "axes", "keep"), [(3, [-1], True), (2, [0], True), (2, [-1, -2], True)]
)
def test_other_means_are_no_norm(exponent: int, axes: list[int], *, keep: bool) -> None:
    b = build(torch.float32)
    b("p = abs", "x")
    b("s = pow.Tensor_Scalar", "p" if exponent == 3 else "x", exponent)
    b("m = mean.dim", "s", axes, keep)
    b("e = add.Tensor", "m", 1e-5)
    b("r = rsqrt", "e")
    b("out = mul.Tensor", "x", "r")
    assert operators_left(b, "out") == []


def test_an_epsilon_that_is_a_value_is_no_norm() -> None:
    b = Build(x=(3, 8), epsilon=torch.tensor(1e-5))
    b("s = pow.Tensor_Scalar", "x", 2)
    b("m = mean.dim", "s", [-1], True)
    b("e = add.Tensor", "m", "epsilon")
    b("r = rsqrt", "e")
    b("out = mul.Tensor", "x", "r")
    assert operators_left(b, "out") == []


class TestSums:
    @pytest.mark.parametrize("dtype", list(ROUND_ONCE))
    def test_a_sum_and_its_norm(self, dtype: torch.dtype) -> None:
        b = build(dtype)
        b("total = add.Tensor", "x", "y")
        b("n = rbln::rms_norm", "total", "w", 1e-5, 0)
        b("out = mul.Tensor", "n", "total")
        before = b.captured("out", "total")
        after = fuse_norm(before)
        assert text(after) == [
            "n, total = rbln::fused_add_rms_norm(x, y, w, 1e-05, 0)",
            "out = mul.Tensor(n, total)",
        ]
        b.assert_same(before, after, ROUND_ONCE[dtype])

    def test_a_sum_that_only_its_norm_reads(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y")
        b("n = rbln::rms_norm", "total", None, 1e-5, 0)
        after = fuse_norm(b.captured("n"))
        assert text(after) == ["n, _ = rbln::fused_add_rms_norm(x, y, None, 1e-05, 0)"]

    def test_two_norms_of_one_sum(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y")
        b("n = rbln::rms_norm", "total", "w", 1e-5, 0)
        b("m = rbln::rms_norm", "total", None, 1e-5, 0)
        before = b.captured("n", "m")
        after = fuse_norm(before)
        assert text(after) == [
            "n, total = rbln::fused_add_rms_norm(x, y, w, 1e-05, 0)",
            "m = rbln::rms_norm(total, None, 1e-05, 0)",
        ]
        b.assert_same(before, after)

    def test_written_out_by_hugging_face(self) -> None:
        b = build(torch.bfloat16)
        b("total = add.Tensor", "x", "y")
        normed(b, "total")
        b("n = to.dtype", "normed", torch.bfloat16)
        b("out = mul.Tensor", "w", "n")
        before = b.captured("out", "total")
        after = fuse_norm(before)
        assert text(after) == ["out, total = rbln::fused_add_rms_norm(x, y, w, 1e-05, 0)"]
        b.assert_same(before, after, 1.6e-2)

    @pytest.mark.parametrize("other", ["row", 1.0, "wide"])
    def test_a_sum_of_another_kind_stays(self, other: object) -> None:
        b = Build(torch.bfloat16, x=(3, 8), row=(1, 8), wide=torch.ones(3, 8))
        b("total = add.Tensor", "x", other)
        b("n = rbln::rms_norm", "total", None, 1e-5, 0)
        before = b.captured("n")
        assert text(fuse_norm(before)) == text(before)

    def test_a_norm_of_another_kind_stays(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y")
        b("n = rbln::layer_norm", "total", "w", None, 1e-5)
        b("m = rbln::rms_norm", "n", "w", 1e-5, 0)
        before = b.captured("m")
        assert text(fuse_norm(before)) == text(before)

    def test_a_scaled_sum_stays(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y", alpha=2)
        b("n = rbln::rms_norm", "total", None, 1e-5, 0)
        before = b.captured("n")
        assert text(fuse_norm(before)) == text(before)

    def test_a_sum_that_is_written_to_stays(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y")
        b("_ = mul_.Tensor", "total", 2.0)
        b("n = rbln::rms_norm", "total", None, 1e-5, 0)
        before = b.captured("n")
        after = fuse_norm(before)
        assert text(after) == text(before)

    def test_a_weight_that_is_computed_after_the_sum_stays_outside(self) -> None:
        b = build(torch.float32)
        b("total = add.Tensor", "x", "y")
        b("scale = neg", "w")
        b("n = rbln::rms_norm", "total", "scale", 1e-5, 0)
        before = b.captured("n")
        assert text(fuse_norm(before)) == text(before)
