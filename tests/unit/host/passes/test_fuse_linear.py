# SPDX-License-Identifier: Apache-2.0
"""Bias, activation and residual into the linear before them."""

from typing import Any

import pytest
import torch

from rbln_host.compiler.passes import fuse_linear
from tests.unit.host.passes.build import Build, text

ROUND_ONCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


def linear(dtype: torch.dtype = torch.float32, **inputs: torch.Tensor) -> Build:
    b = Build(dtype, x=(3, 8), r=(3, 4), **inputs)
    b.weight("w", 4, 8)
    b.weight("b", 4)
    b("y = rbln::linear", "x", "w", None, None, "none")
    return b


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
def test_bias_activation_and_residual(dtype: torch.dtype) -> None:
    b = linear(dtype)
    b("biased = add.Tensor", "y", "b")
    b("active = silu", "biased")
    b("out = add.Tensor", "r", "active")
    before = b.captured("out")
    after = fuse_linear(before)
    assert text(after) == ["out = rbln::linear(x, w, b, r, silu)"]
    b.assert_same(before, after, ROUND_ONCE[dtype])


ACTIVATIONS: dict[str, list[tuple[Any, ...]]] = {
    "relu": [("out = relu", "y")],
    "silu": [("out = silu", "y")],
    "tanh": [("out = tanh", "y")],
    "sigmoid": [("out = sigmoid", "y")],
    "gelu": [("out = gelu", "y")],
    "relu2": [("a = relu", "y"), ("out = pow.Tensor_Scalar", "a", 2)],
    "quick_gelu": [
        ("a = mul.Tensor", "y", 1.702),
        ("b2 = sigmoid", "a"),
        ("out = mul.Tensor", "y", "b2"),
    ],
    "gelu_tanh": [  # as GPT-2 and Phi write it
        ("a = mul.Tensor", "y", 0.5),
        ("p = pow.Tensor_Scalar", "y", 3.0),
        ("q = mul.Tensor", "p", 0.044715),
        ("s = add.Tensor", "y", "q"),
        ("t = mul.Tensor", "s", 0.7978845608028654),
        ("u = tanh", "t"),
        ("v = add.Tensor", "u", 1.0),
        ("out = mul.Tensor", "a", "v"),
    ],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_one_operator_or_written_out(name: str) -> None:
    b = linear()
    for call in ACTIVATIONS[name]:
        b(*call)
    before = b.captured("out")
    after = fuse_linear(before)
    assert text(after) == [f"out = rbln::linear(x, w, None, None, {name})"]
    b.assert_same(before, after, 1e-5)


def test_gelus_approximation_is_kept() -> None:
    b = linear()
    b("out = gelu", "y", approximate="tanh")
    after = fuse_linear(b.captured("out"))
    assert text(after) == ["out = rbln::linear(x, w, None, None, gelu_tanh)"]


def test_a_residual_may_be_a_linear_too() -> None:
    b = linear()
    b("z = rbln::linear", "x", "w", "b", None, "none")
    b("out = add.Tensor", "y", "z")
    before = b.captured("out")
    after = fuse_linear(before)
    assert text(after) == [
        "y = rbln::linear(x, w, None, None, none)",
        "out = rbln::linear(x, w, b, y, none)",
    ]
    b.assert_same(before, after, 1e-6)


PLAIN = "y = rbln::linear(x, w, None, None, none)"
REFUSED: dict[str, tuple[list[tuple[Any, ...]], tuple[str, ...], list[str]]] = {
    "the result is read twice": (
        [("a = relu", "y"), ("out = mul.Tensor", "a", "y")],
        ("out",),
        [PLAIN, "a = relu(y)", "out = mul.Tensor(a, y)"],
    ),
    "the result is an output": ([("out = relu", "y")], ("out", "y"), [PLAIN, "out = relu(y)"]),
    "the residual is broadcast": (
        [("out = add.Tensor", "y", "column")],
        ("out",),
        [PLAIN, "out = add.Tensor(y, column)"],
    ),
    "the residual widens the dtype": (
        [("out = add.Tensor", "y", "wide")],
        ("out",),
        [PLAIN, "out = add.Tensor(y, wide)"],
    ),
    "the residual is written to": (
        [("out = add.Tensor", "y", "r"), ("_ = mul_.Tensor", "r", 2.0)],
        ("out",),
        [PLAIN, "out = add.Tensor(y, r)", "_ = mul_.Tensor(r, 2.0)"],
    ),
    "a part of the activation is read": (
        [("a = relu", "y"), ("out = pow.Tensor_Scalar", "a", 2)],
        ("out", "a"),
        ["a = rbln::linear(x, w, None, None, relu)", "out = pow.Tensor_Scalar(a, 2)"],
    ),
    "it is a product": (
        [("out = mul.Tensor", "y", "r")],
        ("out",),
        [PLAIN, "out = mul.Tensor(y, r)"],
    ),
    "it is a sum with a number": (
        [("out = add.Tensor", "y", 1.0)],
        ("out",),
        [PLAIN, "out = add.Tensor(y, 1.0)"],
    ),
    "the bias comes after an activation": (
        [("a = tanh", "y"), ("out = add.Tensor", "a", "b")],
        ("out",),
        ["a = rbln::linear(x, w, None, None, tanh)", "out = add.Tensor(a, b)"],
    ),
    "the bias is no weight": (
        [("c = neg", "b"), ("out = add.Tensor", "y", "c")],
        ("out",),
        [PLAIN, "c = neg(b)", "out = add.Tensor(y, c)"],
    ),
    "there is a bias already": (
        [("a = add.Tensor", "y", "b"), ("out = add.Tensor", "a", "b")],
        ("out",),
        ["a = rbln::linear(x, w, b, None, none)", "out = add.Tensor(a, b)"],
    ),
    "there is a residual already": (
        [("a = add.Tensor", "y", "r"), ("out = add.Tensor", "a", "r")],
        ("out",),
        ["a = rbln::linear(x, w, None, r, none)", "out = add.Tensor(a, r)"],
    ),
    "there is an activation already": (
        [("a = tanh", "y"), ("out = silu", "a")],
        ("out",),
        ["a = rbln::linear(x, w, None, None, tanh)", "out = silu(a)"],
    ),
    "it is another power": (
        [("a = relu", "y"), ("out = pow.Tensor_Scalar", "a", 3)],
        ("out",),
        ["a = rbln::linear(x, w, None, None, relu)", "out = pow.Tensor_Scalar(a, 3)"],
    ),
    "it is the square of another": (
        [("a = tanh", "y"), ("out = pow.Tensor_Scalar", "a", 2)],
        ("out",),
        ["a = rbln::linear(x, w, None, None, tanh)", "out = pow.Tensor_Scalar(a, 2)"],
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_left_alone_where(reason: str) -> None:
    calls, outputs, expected = REFUSED[reason]
    b = linear(torch.bfloat16, column=torch.ones(3, 1).bfloat16(), wide=torch.ones(3, 4))
    for call in calls:
        b(*call)
    before = b.captured(*outputs)
    after = fuse_linear(before)
    assert text(after) == expected
    b.assert_same(before, after, 1.6e-2)


def test_a_scaled_sum_is_no_residual() -> None:
    b = linear()
    b("out = add.Tensor", "y", "r", alpha=2)
    assert text(fuse_linear(b.captured("out"))) == [PLAIN, "out = add.Tensor(y, r, alpha=2)"]


ACROSS: list[tuple[str, tuple[Any, ...]]] = [
    ("none", ("out = relu", "y")),
    ("none", ("out = add.Tensor", "y", "r")),
    ("relu", ("out = square", "y")),
]


@pytest.mark.parametrize(("activation", "call"), ACROSS)
def test_nothing_is_fused_across_a_write(activation: str, call: tuple[Any, ...]) -> None:
    b = Build(x=(3, 8), r=(3, 4))
    b.weight("w", 4, 8)
    b("y = rbln::linear", "x", "w", None, None, activation)
    b("_ = mul_.Tensor", "x", 2.0)
    b(*call)
    before = b.captured("out")
    after = fuse_linear(before)
    assert text(after) == text(before)
    b.assert_same(before, after)


def test_an_activation_after_the_residual_stays() -> None:
    b = linear()
    b("s = add.Tensor", "y", "r")
    b("out = relu", "s")
    before = b.captured("out")
    after = fuse_linear(before)
    assert text(after) == ["s = rbln::linear(x, w, None, r, none)", "out = relu(s)"]
    b.assert_same(before, after, 1e-6)
