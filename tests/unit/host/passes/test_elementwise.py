# SPDX-License-Identifier: Apache-2.0
"""Groups of commands that compute element by element."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbln_host.compiler.passes import elementwise
from rbln_host.ops.elementwise import MAX_DEPTH, MAX_INPUTS, check_program
from tests.unit.host.passes.build import Build, text

SINGLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "sum": (("out = add.Tensor", "x", "y"), "[x, y], i0 i1 add"),
    "sum with a number": (("out = add.Tensor", "x", 2), "[x], i0 c2.0 add"),
    "sum with itself": (("out = add.Tensor", "x", "x"), "[x], i0 i0 add"),
    "difference": (("out = sub.Tensor", "x", "y"), "[x, y], i0 i1 sub"),
    "reversed difference": (("out = rsub.Scalar", "x", 1), "[x], c1.0 i0 sub"),
    "product": (("out = mul.Tensor", "x", 0.1), "[x], i0 c0.1 mul"),
    "quotient": (("out = div.Tensor", "x", "y"), "[x, y], i0 i1 div"),
    "reciprocal": (("out = reciprocal", "x"), "[x], c1.0 i0 div"),
    "square": (("out = pow.Tensor_Scalar", "x", 2), "[x], i0 square"),
    "cube": (("out = pow.Tensor_Scalar", "x", 3.0), "[x], i0 cube"),
    "gelu": (("out = gelu", "x"), "[x], i0 gelu"),
    "silu": (("out = silu", "x"), "[x], i0 silu"),
    "clamp": (("out = clamp", "x", -0.5, 0.5), "[x], i0 c-0.5 maximum c0.5 minimum"),
    "clamp from below": (("out = clamp_min", "x", 0.0), "[x], i0 c0.0 maximum"),
    "clamp from above": (("out = clamp", "x", None, 0.5), "[x], i0 c0.5 minimum"),
    "larger": (("out = maximum", "x", "y"), "[x, y], i0 i1 maximum"),
    "smaller": (("out = min.other", "x", "y"), "[x, y], i0 i1 minimum"),
    "infinity": (("out = mul.Tensor", "x", float("inf")), "[x], i0 cinf mul"),
}


@pytest.mark.parametrize("what", SINGLE)
def test_one_command(what: str) -> None:
    call, expected = SINGLE[what]
    b = Build(x=(3, 4), y=(3, 4))
    b(*call)
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == [f"out = rbln::elementwise({expected})"]
    b.assert_same(before, after, 1e-6)


def test_a_scaled_sum() -> None:
    b = Build(x=(3, 4), y=(3, 4))
    b("s = add.Tensor", "x", "y", alpha=2)
    b("out = gelu", "s", approximate="tanh")
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == ["out = rbln::elementwise([x, y], i0 i1 c2.0 mul add gelu_tanh)"]
    b.assert_same(before, after, 1e-6)


def test_a_chain_is_one_command() -> None:
    """A soft cap."""
    b = Build(torch.bfloat16, x=(3, 4))
    b("a = div.Tensor", "x", 30.0)
    b("t = tanh", "a")
    b("out = mul.Tensor", "t", 30.0)
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == ["out = rbln::elementwise([x], i0 c30.0 div tanh c30.0 mul)"]
    b.assert_same(before, after, 1.6e-2)


def test_casts_inside_are_left_out() -> None:
    b = Build(torch.bfloat16, x=(3, 4), y=(3, 4))
    b("wide = to.dtype", "x", torch.float32)
    b("e = exp", "wide")
    b("narrow = to.dtype", "e", torch.bfloat16)
    b("out = mul.Tensor", "narrow", "y")
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == ["out = rbln::elementwise([x, y], i0 exp i1 mul)"]
    b.assert_same(before, after, 1.6e-2)


def test_a_cast_that_decides_the_dtype_stays() -> None:
    b = Build(torch.bfloat16, x=(3, 4))
    b("wide = to.dtype", "x", torch.float32)
    b("out = exp", "wide")
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == [
        "wide = to.dtype(x, float32)",
        "out = rbln::elementwise([wide], i0 exp)",
    ]
    b.assert_same(before, after, 1e-6)


def test_an_axis_is_broadcast() -> None:
    b = Build(x=(3, 1, 4), y=(2, 1))
    b("out = mul.Tensor", "x", "y")
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == ["out = rbln::elementwise([x, y], i0 i1 mul)"]
    b.assert_same(before, after)


def test_a_smaller_value_is_not_computed_for_every_element() -> None:
    b = Build(x=(3, 4), rows=(3, 1))
    b("r = exp", "rows")
    b("out = mul.Tensor", "x", "r")
    after = elementwise(b.captured("out"))
    assert text(after) == [
        "r = rbln::elementwise([rows], i0 exp)",
        "out = rbln::elementwise([x, r], i0 i1 mul)",
    ]


def test_a_value_that_is_read_twice_is_computed_once() -> None:
    b = Build(x=(3, 4))
    b("e = exp", "x")
    b("out = mul.Tensor", "e", "e")
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == [
        "e = rbln::elementwise([x], i0 exp)",
        "out = rbln::elementwise([e], i0 i0 mul)",
    ]
    b.assert_same(before, after)


def test_an_output_is_computed_for_itself() -> None:
    b = Build(x=(3, 4))
    b("e = exp", "x")
    b("out = neg", "e")
    after = elementwise(b.captured("out", "e"))
    assert len(text(after)) == 2


LEFT: dict[str, tuple[Any, ...]] = {
    "integers": ("out = add.Tensor", "ids", 1),
    "a quotient of integers": ("out = div.Tensor", "ids", "ids"),
    "doubles": ("out = exp", "double"),
    "a cast": ("out = to.dtype", "x", torch.bfloat16),
    "a cast of integers": ("out = to.dtype", "ids", torch.float32),
    "a power of the element": ("out = pow.Tensor_Tensor", "x", "x"),
    "another power": ("out = pow.Tensor_Scalar", "x", 1.5),
    "a power of a number": ("out = pow.Scalar", 2, "x"),
    "a comparison": ("out = gt.Scalar", "x", 0),
    "an axis' largest": ("out, _ = max.dim", "x", 1),
    "the largest": ("out = max", "x"),
    "in place": ("out = relu_", "x"),
    "a sum of two dtypes of which one is double": ("out = add.Tensor", "x", "double"),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_alone(what: str) -> None:
    b = Build(x=(3, 4), ids=torch.tensor([1, 2]), double=torch.ones(3, 4).double())
    b(*LEFT[what])
    before = b.captured("out")
    after = elementwise(before)
    assert text(after) == text(before)


def test_a_rounding_quotient_is_left_alone() -> None:
    b = Build(x=(3, 4))
    b("out = div.Tensor_mode", "x", 2.0, rounding_mode="floor")
    before = b.captured("out")
    assert text(elementwise(before)) == text(before)


def test_nothing_moves_across_a_write() -> None:
    b = Build(x=(3, 4), y=(3, 4))
    b("a = exp", "x")
    b("_ = mul_.Tensor", "x", 2.0)
    b("c = exp", "x")
    b("d = mul.Tensor", "y", "y")
    b("out = add.Tensor", "a", "c")
    before = b.captured("out", "d")
    after = elementwise(before)
    assert text(after) == [
        "a = exp(x)",
        "_ = mul_.Tensor(x, 2.0)",
        "c = exp(x)",
        "d = rbln::elementwise([y], i0 i0 mul)",
        "out = rbln::elementwise([a, c], i0 i1 add)",
    ]
    b.assert_same(before, after)


def test_groups_keep_to_the_operators_limits() -> None:
    many = {f"x{i}": (2, 3) for i in range(12)}
    b = Build(torch.float32, **many)
    last = "x0"
    for i in range(1, 12):
        b(f"s{i} = add.Tensor", last, f"x{i}")
        last = f"s{i}"
    before = b.captured(last)
    after = elementwise(before)
    sizes = [len(command.args[0]) for command in after.graph.commands]
    assert len(sizes) == 2
    assert max(sizes) == MAX_INPUTS
    b.assert_same(before, after, 1e-6)


def test_groups_keep_to_the_depth_of_the_stack() -> None:
    b = Build(x=(2, 3))
    last = "x"
    for i in range(MAX_DEPTH + 2):
        b(f"s{i} = sub.Tensor", "x", last)
        last = f"s{i}"
    before = b.captured(last)
    after = elementwise(before)
    assert len(after.graph.commands) == 2
    b.assert_same(before, after, 1e-6)


def test_a_long_chain_needs_little_stack() -> None:
    b = Build(x=(2, 3))
    last = "x"
    for i in range(12):
        b(f"s{i} = mul.Tensor", last, 0.5)
        b(f"t{i} = add.Tensor", f"s{i}", 1.0)
        last = f"t{i}"
    before = b.captured(last)
    after = elementwise(before)
    assert len(after.graph.commands) == 1
    b.assert_same(before, after, 1e-6)


def test_groups_are_not_endless() -> None:
    b = Build(x=(2, 3))
    last = "x"
    for i in range(100):
        b(f"s{i} = neg", last)
        last = f"s{i}"
    before = b.captured(last)
    after = elementwise(before)
    assert [len(c.args[1].split(" ")) for c in after.graph.commands] == [64, 38]
    b.assert_same(before, after)


UNARY = ["exp", "tanh", "sigmoid", "neg", "relu", "silu", "cos", "abs"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "maximum"]


@settings(max_examples=100)
@given(st.data())
def test_random_expressions_compute_the_same(data: st.DataObject) -> None:
    b = Build(x=(2, 3), y=(2, 3), row=(3,), column=(2, 1))
    values = ["x", "y", "row", "column"]
    for i in range(data.draw(st.integers(1, 14))):
        name, one = f"v{i}", data.draw(st.sampled_from(values))
        if data.draw(st.booleans()):
            b(f"{name} = {data.draw(st.sampled_from(UNARY))}", one)
            b(f"{name}s = tanh", name)
            name = f"{name}s"
        else:
            other = data.draw(st.sampled_from([*values, 0.5, 2]))
            operator = data.draw(st.sampled_from(BINARY[:3] if other in {0.5, 2} else BINARY))
            b(f"{name} = {operator}", one, other)
        values.append(name)
    before = b.captured(values[-1], data.draw(st.sampled_from(values)))
    after = elementwise(before)
    for command in after.graph.commands:
        assert command.operator == "rbln::elementwise"
        check_program(command.args[1], len(command.args[0]))
    b.assert_same(before, after, 1e-5)
