# SPDX-License-Identifier: Apache-2.0
"""One form for what can be written in several."""

from typing import Any

import pytest
import torch

from rbln_host.compiler.passes import canonicalise, lower
from rbln_host.compiler.passes.rewrite import Made
from tests.unit.host.passes.build import Build, operators, text

LINEARS: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "linear": ([("y = linear", "x", "w")], "rbln::linear(x, w, None, None, none)"),
    "linear with bias": ([("y = linear", "x", "w", "b")], "rbln::linear(x, w, b, None, none)"),
    "mm": ([("t = t", "w"), ("y = mm", "x", "t")], "rbln::linear(x, w, None, None, none)"),
    "matmul": (
        [("t = transpose.int", "w", 0, 1), ("y = matmul", "x", "t")],
        "rbln::linear(x, w, None, None, none)",
    ),
    "addmm": (
        [("t = permute", "w", [1, 0]), ("y = addmm", "b", "x", "t")],
        "rbln::linear(x, w, b, None, none)",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", LINEARS)
def test_products_with_a_weight(form: str, dtype: torch.dtype) -> None:
    calls, expected = LINEARS[form]
    b = Build(dtype, x=(3, 8))
    b.weight("w", 4, 8)
    b.weight("b", 4)
    for call in calls:
        b(*call)
    before = b.captured("y")
    after = canonicalise(before)
    assert text(after) == [f"y = {expected}"]
    b.assert_same(before, after, 1e-6 if dtype == torch.float32 else 1.6e-2)


def test_a_weight_stored_the_other_way_round_is_turned_once() -> None:
    """GPT-2's Conv1D in Hugging Face."""
    b = Build(x=(3, 8))
    b.weight("w", 8, 4)
    b.weight("b", 4)
    b("y = addmm", "b", "x", "w")
    b("z = mm", "x", "w")
    before = b.captured("y", "z")
    made: Made = {}
    after = canonicalise(before, made)
    assert text(after) == [
        "y = rbln::linear(x, w_model.w^T, b, None, none)",
        "z = rbln::linear(x, w_model.w^T, None, None, none)",
    ]
    assert set(after.weights) == {"model.w^T", "model.b"}
    b.assert_same(before, after, 1e-6)
    again = canonicalise(before, made)
    assert again.weights["model.w^T"] is after.weights["model.w^T"]


REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "the matrix is computed": [("c = mul.Tensor", "w", 2.0), ("y = linear", "x", "c")],
    "the input is an axis": [("v = select.int", "x", 0, 0), ("y = linear", "v", "w")],
    "the bias is a matrix": [
        ("t = t", "w"),
        ("m = unsqueeze", "b", 0),
        ("y = addmm", "m", "x", "t"),
    ],
    "the dtype is double": [
        ("d = to.dtype", "x", torch.float64),
        ("y = linear", "d", "double"),
    ],
    "the square matrix is not turned": [
        ("s = slice.Tensor", "x", 1, 0, 4),
        ("p = permute", "square", [0, 1]),
        ("y = mm", "s", "p"),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_products_stay_where(reason: str) -> None:
    b = Build(x=(3, 8))
    b.weight("w", 4, 8)
    b.weight("square", 4, 4)
    b.weight("double", 4, 8, dtype=torch.float64)
    b.weight("b", 4)
    for call in REFUSED[reason]:
        b(*call)
    before = b.captured("y")
    after = canonicalise(before)
    assert text(after) == text(before)
    b.assert_same(before, after)


def test_addmm_with_factors_stays() -> None:
    b = Build(x=(3, 8))
    b.weight("w", 4, 8)
    b.weight("b", 4)
    b("t = t", "w")
    b("y = addmm", "b", "x", "t", alpha=2)
    assert "y = addmm(b, x, t, alpha=2)" in text(canonicalise(b.captured("y")))


def test_norms() -> None:
    b = Build(x=(3, 8))
    b.weight("w", 8)
    b.weight("b", 8)
    b("y = layer_norm", "x", [8], "w", "b", 1e-3, False)
    b("z = layer_norm", "y", [8])
    b("n = rms_norm", "z", [8], "w", 1e-6)
    before = b.captured("n")
    after = canonicalise(before)
    assert text(after) == [
        "y = rbln::layer_norm(x, w, b, 0.001)",
        "z = rbln::layer_norm(y, None, None, 1e-05)",
        "n = rbln::rms_norm(z, w, 1e-06, 0)",
    ]
    b.assert_same(before, after, 1e-6)


@pytest.mark.parametrize(
    "call",
    [
        ("y = layer_norm", "x", [3, 8]),
        ("y = layer_norm", "x", [8], "wide"),
        ("y = rms_norm", "x", [8]),
        ("y = rms_norm", "x", [8], "wide", 1e-6),
        ("y = rms_norm", "x", [3, 8], None, 1e-6),
        ("y = layer_norm", "double", [8]),
        ("y = rms_norm", "double", [8], None, 1e-6),
    ],
)
def test_norms_of_another_kind_stay(call: tuple[Any, ...]) -> None:
    b = Build(torch.bfloat16, x=(3, 8), double=torch.rand(3, 8).double())
    b.weight("wide", 8, dtype=torch.float32)
    b(*call)
    before = b.captured("y")
    assert text(canonicalise(before)) == text(before)


@pytest.mark.parametrize(("index", "kept"), [(torch.int32, False), (torch.int16, True)])
def test_ids_need_no_cast(index: torch.dtype, *, kept: bool) -> None:
    b = Build(ids=torch.tensor([3, 0, 1], dtype=index))
    b.weight("table", 4, 8)
    b("wide = to.dtype", "ids", torch.int64)
    b("y = embedding", "table", "wide")
    b("z = index_select", "table", 0, "wide")
    before = b.captured("y", "z")
    after = canonicalise(before)
    source = "wide" if kept else "ids"
    assert text(after)[-2:] == [
        f"y = embedding(table, {source})",
        f"z = index_select(table, 0, {source})",
    ]
    assert len(text(after)) == 2 + kept
    b.assert_same(before, after)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_table_begins_where_ids_are_moved_to(index: torch.dtype) -> None:
    """OPT looks up ``positions + 2``."""
    b = Build(ids=torch.tensor([1, 0], dtype=index))
    b.weight("table", 4, 8)
    b("wide = to.dtype", "ids", torch.int64)
    b("moved = add.Tensor", "wide", 2)
    b("y = embedding", "table", "moved")
    before = b.captured("y")
    made: Made = {}
    after = canonicalise(before, made)
    assert text(after) == ["y = embedding(w_model.table[2:], ids)"]
    assert torch.equal(after.weights["model.table[2:]"], before.weights["model.table"][2:])
    b.assert_same(before, after)


@pytest.mark.parametrize(
    "call",
    [
        ("add.Tensor", "ids", 4),
        ("add.Tensor", "ids", -1),
        ("add.Tensor", "ids", "ids"),
        ("sub.Tensor", "ids", 1),
    ],
)
def test_other_computed_ids_stay(call: tuple[Any, ...]) -> None:
    operator, *args = call
    b = Build(ids=torch.tensor([1, 1]))
    b.weight("table", 4, 8)
    b(f"moved = {operator}", *args)
    b("y = embedding", "table", "moved")
    before = b.captured("y")
    assert text(canonicalise(before)) == text(before)


def test_ids_that_change_are_cast_where_they_were() -> None:
    b = Build(ids=torch.tensor([1, 0], dtype=torch.int32))
    b.weight("table", 4, 8)
    b("wide = to.dtype", "ids", torch.int64)
    b("_ = add_.Tensor", "ids", 1)
    b("y = embedding", "table", "wide")
    before = b.captured("y")
    after = canonicalise(before)
    assert text(after) == text(before)
    b.assert_same(before, after)


def test_nothing_joined_stays() -> None:
    b = Build(x=(2, 4))
    b("a, c = split_with_sizes", "x", [4, 0], 1)
    b("out = cat", ["c", "c"], 1)
    before = b.captured("out")
    assert text(canonicalise(before)) == text(before)


def test_pieces_of_no_size_go() -> None:
    """What vLLM's rotary embedding joins when it rotates the whole head."""
    b = Build(x=(2, 3, 4), y=(2, 3, 4))
    b("a = neg", "x")
    b("rest = slice.Tensor", "x", 2, 4, 9223372036854775807)
    b("whole = cat", ["a", "rest"], -1)
    b("both = cat", ["a", "rest", "y"], -1)
    b("out = relu", "whole")
    before = b.captured("out", "both")
    after = canonicalise(before)
    assert text(after) == ["a = neg(x)", "both = cat([a, y], -1)", "out = relu(a)"]
    b.assert_same(before, after)


def test_a_piece_of_no_size_that_widens_the_dtype_stays() -> None:
    b = Build(torch.bfloat16, x=(2, 4), wide=torch.ones(2, 4))
    b("rest = slice.Tensor", "wide", 1, 4, 4)
    b("a = neg", "x")
    b("out = cat", ["a", "rest"], 1)
    before = b.captured("out")
    after = canonicalise(before)
    assert text(after) == text(before)


def test_copies_that_change_nothing_go() -> None:
    b = Build(x=(2, 6))
    b("a = neg", "x")
    b("c = clone", "a")
    b("out = relu", "c")
    before = b.captured("out")
    after = canonicalise(before)
    assert text(after) == ["a = neg(x)", "out = relu(a)"]


COPIES: dict[str, list[tuple[Any, ...]]] = {
    "it is written to": [("a = neg", "x"), ("out = clone", "a"), ("_ = mul_.Tensor", "out", 2)],
    "its source is": [("a = neg", "x"), ("out = clone", "a"), ("_ = mul_.Tensor", "a", 2)],
    "it is of an input": [("out = clone", "x")],
    "it is of an input joined": [
        ("rest = slice.Tensor", "x", 1, 6, 6),
        ("out = cat", ["x", "rest"], 1),
    ],
    "it has other strides": [
        ("a = neg", "x"),
        ("t = transpose.int", "a", 0, 1),
        ("rest = slice.Tensor", "t", 1, 2, 2),
        ("out = cat", ["t", "rest"], 1),
    ],
}


@pytest.mark.parametrize("reason", COPIES)
def test_a_copy_stays_where(reason: str) -> None:
    b = Build(x=(2, 6))
    for call in COPIES[reason]:
        b(*call)
    before = b.captured("out")
    after = canonicalise(before)
    assert any("clone" in line or "cat" in line for line in text(after))
    b.assert_same(before, after)
    b.assert_same(before, lower(before))


def test_type_as_is_a_cast() -> None:
    b = Build(torch.bfloat16, x=(3, 4))
    b("wide = to.dtype", "x", torch.float32)
    b("twice = mul.Tensor", "wide", 2.0)
    b("y = type_as", "twice", "x")
    before = b.captured("y")
    after = canonicalise(before)
    assert text(after)[-1] == "y = to.dtype(twice, bfloat16)"
    b.assert_same(before, after)


def test_a_norm_of_gemma_in_bf16() -> None:
    """It scales by ``1 + weight`` in fp32 and casts with ``type_as``."""
    b = Build(torch.bfloat16, x=(3, 8))
    b.weight("w", 8)
    b("h = to.dtype", "x", torch.float32)
    b("square = pow.Tensor_Scalar", "h", 2)
    b("mean = mean.dim", "square", [-1], True)
    b("stable = add.Tensor", "mean", 1e-6)
    b("scale = rsqrt", "stable")
    b("normed = mul.Tensor", "h", "scale")
    b("wide = to.dtype", "w", torch.float32)
    b("weight = add.Tensor", "wide", 1.0)
    b("scaled = mul.Tensor", "normed", "weight")
    b("y = type_as", "scaled", "x")
    before = b.captured("y")
    after = lower(before)
    assert operators(after) == ["rbln::rms_norm"]
    b.assert_same(before, after, 1.6e-2)
