# SPDX-License-Identifier: Apache-2.0
"""Activations of one half times the other half."""

from typing import Any

import pytest
import torch

from rbln_host.compiler.passes import fuse_gated
from tests.unit.host.passes.build import Build, text

END = 9223372036854775807
HALVES: dict[str, list[tuple[Any, ...]]] = {
    "slice": [
        ("g = slice.Tensor", "both", 1, 0, 16),
        ("u = slice.Tensor", "both", 1, 16, END),
    ],
    "chunk": [("g, u = chunk", "both", 2, -1)],
    "split": [("g, u = split.Tensor", "both", 16, -1)],
    "sizes": [("g, u = split_with_sizes", "both", [16, 16], -1)],
}


def build(dtype: torch.dtype = torch.float32, features: int = 16) -> Build:
    b = Build(dtype, x=(3, 8))
    b.weight("w", 2 * features, 8)
    b.weight("b", 2 * features)
    b("both = rbln::linear", "x", "w", "b", None, "none")
    return b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", HALVES)
def test_halves_of_a_linear(halves: str, dtype: torch.dtype) -> None:
    b = build(dtype)
    for call in HALVES[halves]:
        b(*call)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out")
    after = fuse_gated(before)
    assert text(after) == ["out = rbln::gated_linear(x, w, b, silu)"]
    b.assert_same(before, after, 1e-6 if dtype == torch.float32 else 1.6e-2)


def test_halves_of_another_value() -> None:
    b = Build(both=(3, 2, 32))
    b("g, u = chunk", "both", 2, 2)
    b("a = gelu", "g", approximate="tanh")
    b("out = mul.Tensor", "u", "a")
    before = b.captured("out")
    after = fuse_gated(before)
    assert text(after) == ["out = rbln::gated_activation(both, gelu_tanh)"]
    b.assert_same(before, after, 1e-6)


def test_vllms_layer() -> None:
    """Its SiluAndMul is captured as one operator."""
    b = build()
    b("out = rbln::gated_activation", "both", "silu")
    before = b.captured("out")
    after = fuse_gated(before)
    assert text(after) == ["out = rbln::gated_linear(x, w, b, silu)"]
    b.assert_same(before, after, 1e-6)


def test_an_activation_written_out() -> None:
    b = build()
    b("g, u = chunk", "both", 2, -1)
    b("s = mul.Tensor", "g", 1.702)
    b("t = sigmoid", "s")
    b("a = mul.Tensor", "g", "t")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out")
    after = fuse_gated(before)
    assert text(after) == ["out = rbln::gated_linear(x, w, b, quick_gelu)"]
    b.assert_same(before, after, 1e-5)


OUTSIDE: dict[str, tuple[str, ...]] = {
    "the linear": ("out", "both"),
    "the gate": ("out", "g"),
    "the other half": ("out", "u"),
}


@pytest.mark.parametrize("who", OUTSIDE)
def test_a_linear_stays_where_something_else_reads(who: str) -> None:
    b = build()
    b("g, u = chunk", "both", 2, -1)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured(*OUTSIDE[who])
    after = fuse_gated(before)
    assert "both = rbln::linear(x, w, b, None, none)" in text(after)
    assert "out = rbln::gated_activation(both, silu)" in text(after)
    b.assert_same(before, after, 1e-6)


def test_a_linear_stays_where_another_part_is_read() -> None:
    b = build()
    b("g, part, _ = split_with_sizes", "both", [16, 8, 8], -1)
    b("u = slice.Tensor", "both", 1, 16, END)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out", "part")
    after = fuse_gated(before)
    assert "out = rbln::gated_activation(both, silu)" in text(after)
    b.assert_same(before, after, 1e-6)


def test_a_linear_stays_where_a_view_of_it_is_read() -> None:
    b = build()
    b("v = view", "both", [3, 32])
    b("g, _ = chunk", "v", 2, -1)
    b("_, u = chunk", "both", 2, -1)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out", "v")
    after = fuse_gated(before)
    assert "both = rbln::linear(x, w, b, None, none)" in text(after)
    b.assert_same(before, after, 1e-6)


def test_a_linear_whose_input_is_written_to_stays() -> None:
    b = build()
    b("g, u = chunk", "both", 2, -1)
    b("_ = mul_.Tensor", "x", 2.0)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out")
    after = fuse_gated(before)
    assert "out = rbln::gated_activation(both, silu)" in text(after)
    b.assert_same(before, after, 1e-6)


def test_a_linear_of_features_that_its_kernel_does_not_take_stays() -> None:
    b = build(features=12)
    b("g, u = chunk", "both", 2, -1)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    after = fuse_gated(b.captured("out"))
    assert text(after) == [
        "both = rbln::linear(x, w, b, None, none)",
        "out = rbln::gated_activation(both, silu)",
    ]


def test_a_linear_with_an_activation_stays() -> None:
    b = Build(x=(3, 8))
    b.weight("w", 32, 8)
    b("both = rbln::linear", "x", "w", None, None, "relu")
    b("out = rbln::gated_activation", "both", "silu")
    before = b.captured("out")
    assert text(fuse_gated(before)) == text(before)


REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "the gate is the second half": [
        ("u, g = chunk", "both", 2, -1),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "u"),
    ],
    "they are parts of another axis": [
        ("t = transpose.int", "both", 0, 1),
        ("g, u = chunk", "t", 2, 0),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "u"),
    ],
    "they overlap": [
        ("g = slice.Tensor", "both", 1, 0, 16),
        ("u = slice.Tensor", "both", 1, 8, 24),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "u"),
    ],
    "they are a quarter each": [
        ("g = slice.Tensor", "both", 1, 0, 8),
        ("u = slice.Tensor", "both", 1, 8, 16),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "u"),
    ],
    "both are the gate": [
        ("g = slice.Tensor", "both", 1, 0, 16),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "g"),
    ],
    "the value is written to": [
        ("g, u = chunk", "both", 2, -1),
        ("a = silu", "g"),
        ("out = mul.Tensor", "a", "u"),
        ("_ = mul_.Tensor", "both", 2.0),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_left_alone_where(reason: str) -> None:
    b = build()
    for call in REFUSED[reason]:
        b(*call)
    before = b.captured("out")
    after = fuse_gated(before)
    assert text(after) == text(before)


def test_doubles_are_left_alone() -> None:
    b = Build(torch.float64, both=(3, 32))
    b("g, u = chunk", "both", 2, -1)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out")
    assert text(fuse_gated(before)) == text(before)


def test_an_activation_that_is_read_elsewhere_stays() -> None:
    b = build()
    b("g, u = chunk", "both", 2, -1)
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out", "a")
    assert text(fuse_gated(before)) == text(before)
