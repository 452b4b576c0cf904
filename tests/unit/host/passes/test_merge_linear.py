# SPDX-License-Identifier: Apache-2.0
"""Linears over one input become one."""

from collections.abc import Callable

import pytest
import torch

from rbln_host.compiler.passes import fuse_gated, merge_linear
from tests.unit.host.passes.build import Build, text


def qkv(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> Build:
    b = Build(dtype, x=(3, 8))
    for name, size in (("q", 8), ("k", 4), ("v", 4)):
        b.weight(f"w{name}", size, 8)
        b.weight(f"b{name}", size)
        b(f"{name} = rbln::linear", "x", f"w{name}", f"b{name}" if bias else None, None, "none")
    return b


@pytest.mark.parametrize("bias", [True, False])
def test_query_key_and_value(*, bias: bool) -> None:
    b = qkv(bias=bias)
    b("heads = view", "q", [3, 2, 4])
    before = b.captured("heads", "k", "v")
    after = merge_linear(before)
    both = "w_model.bq|model.bk|model.bv" if bias else None
    assert text(after) == [
        f"q_merged = rbln::linear(x, w_model.wq|model.wk|model.wv, {both}, None, none)",
        "q, k, v = split_with_sizes(q_merged, [8, 4, 4], -1)",
        "heads = view(q, [3, 2, 4])",
    ]
    expected = {"model.wq|model.wk|model.wv", *(["model.bq|model.bk|model.bv"] if bias else [])}
    assert set(after.weights) == expected
    b.assert_same(before, after, 1e-6)


def test_gate_and_up_whatever_their_order() -> None:
    b = Build(x=(3, 8))
    b.weight("wu", 16, 8)
    b.weight("wg", 16, 8)
    b("u = rbln::linear", "x", "wu", None, None, "none")
    b("g = rbln::linear", "x", "wg", None, None, "none")
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out")
    after = fuse_gated(merge_linear(before))
    assert text(after) == ["out = rbln::gated_linear(x, w_model.wg|model.wu, None, silu)"]
    b.assert_same(before, after, 1e-6)


def test_a_third_linear_is_not_merged_with_a_pair() -> None:
    b = Build(x=(3, 8))
    for name in ("wg", "wu", "wz"):
        b.weight(name, 16, 8)
        b(f"{name[1]} = rbln::linear", "x", name, None, None, "none")
    b("a = silu", "g")
    b("out = mul.Tensor", "a", "u")
    before = b.captured("out", "z")
    after = merge_linear(before)
    assert set(after.weights) == {"model.wg|model.wu", "model.wz"}
    b.assert_same(before, after, 1e-6)


def test_a_merged_weight_is_made_once_for_all_programs() -> None:
    made: dict[object, torch.Tensor] = {}
    before = qkv().captured("q", "k", "v")
    one, other = merge_linear(before, made), merge_linear(before, made)
    (first,), (second,) = one.weights.values(), other.weights.values()
    assert first is second


def test_weights_of_one_name_in_two_models_are_told_apart() -> None:
    made: dict[object, torch.Tensor] = {}
    one = merge_linear(qkv().captured("q", "k", "v"), made)
    other = qkv()
    other.weights["wq"] = torch.zeros(8, 8)
    (weight,) = merge_linear(other.captured("q", "k", "v"), made).weights.values()
    assert not torch.equal(weight, *one.weights.values())


def test_layers_are_merged_each_on_its_own() -> None:
    b = qkv()
    b("h = relu", "q")
    for name in ("k2", "v2"):
        b.weight(f"w{name}", 4, 8)
        b(f"{name} = rbln::linear", "h", f"w{name}", None, None, "none")
    before = b.captured("k", "v", "k2", "v2")
    after = merge_linear(before)
    names = [line.split(" ")[0] for line in text(after) if "linear" in line]
    assert names == ["q", "k_merged", "k2_merged"]
    b.assert_same(before, after, 1e-6)


def _alone(b: Build) -> None:
    b("out = rbln::linear", "x", "w1", None, None, "none")


def _of_two_inputs(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("out = rbln::linear", "y", "w2", None, None, "none")


def _one_with_a_bias(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", "b1", None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("out = cat", ["a", "c"], -1)


def _one_with_an_activation(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "relu")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("out = cat", ["a", "c"], -1)


def _one_before_an_activation(b: Build) -> None:
    """Phi's first MLP layer reads the norm that attention reads."""
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("d = gelu", "c")
    b("out = cat", ["a", "d"], -1)


def _one_before_a_sum(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("out = add.Tensor", "a", "c")


def _one_before_an_activation_in_a_sum(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("d = silu", "a")
    b("out = add.Tensor", "d", "c")


def _one_of_a_tied_weight(b: Build) -> None:
    b("e = embedding", "w1", "ids")
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("d = cat", ["a", "c"], -1)
    b("out = cat", ["d", "e"], -1)


def _of_an_input_that_changes(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("_ = mul_.Tensor", "x", 2.0)
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("out = cat", ["a", "c"], -1)


def _where_a_part_must_be_contiguous(b: Build) -> None:
    b("a = rbln::linear", "x", "w1", None, None, "none")
    b("c = rbln::linear", "x", "w2", None, None, "none")
    b("d = view", "a", [-1])
    b("e = view", "c", [-1])
    b("out = cat", ["d", "e"], 0)


LEFT: list[Callable[[Build], None]] = [
    *(_alone, _of_two_inputs, _one_with_a_bias, _one_with_an_activation),
    *(_one_before_an_activation, _one_before_a_sum, _one_of_a_tied_weight),
    _one_before_an_activation_in_a_sum,
    *(_of_an_input_that_changes, _where_a_part_must_be_contiguous),
]


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_left_alone(make: Callable[[Build], None]) -> None:
    b = Build(x=(3, 8), y=(3, 8), ids=torch.tensor([1, 0, 2]))
    b.weight("w1", 4, 8)
    b.weight("w2", 4, 8)
    b.weight("b1", 4)
    make(b)
    before = b.captured("out")
    after = merge_linear(before)
    assert text(after) == text(before)
    b.assert_same(before, after)
