# SPDX-License-Identifier: Apache-2.0
"""What is computed of weights alone, once for all programs."""

import torch

from rbln_host.compiler.passes import fold_weights
from rbln_host.compiler.passes.rewrite import Made
from tests.unit.host.passes.build import Build, text


def norm_weight(b: Build) -> None:
    b("w32 = to.dtype", "w", torch.float32)
    b("w1 = add.Tensor", "w32", 1.0)
    b("y = rbln::rms_norm", "x", "w1", 1e-6, 0)


def test_gemmas_norm_weight() -> None:
    b = Build(torch.bfloat16, x=(2, 4))
    b.weight("w", 4)
    norm_weight(b)
    before = b.captured("y")
    after = fold_weights(before)
    assert text(after) == ["y = rbln::rms_norm(x, w_model.w@float32+1.0, 1e-06, 0)"]
    assert set(after.weights) == {"model.w@float32+1.0"}
    b.assert_same(before, after)


def test_the_same_weight_is_made_once_for_all_programs() -> None:
    b = Build(torch.bfloat16, x=(2, 4))
    b.weight("w", 4)
    norm_weight(b)
    b("v = add.Tensor", "w", 1.0)
    before = b.captured("y", "v")
    made: Made = {}
    one, other = fold_weights(before, made), fold_weights(before, made)
    assert set(one.weights) == {"model.w@float32+1.0", "model.w+1.0"}
    assert all(one.weights[name] is other.weights[name] for name in one.weights)


def test_large_weights_are_left() -> None:
    b = Build(torch.bfloat16, x=(2, 4))
    b.weight("w", 4, 4)
    b("w1 = add.Tensor", "w", 1.0)
    b("y = linear", "x", "w1")
    b("w32 = to.dtype", "w", torch.float32)
    before = b.captured("y", "w32")
    assert text(fold_weights(before)) == text(before)


def test_a_table_that_is_only_looked_up_is_cast_once() -> None:
    b = Build(torch.bfloat16, ids=torch.tensor([1, 0]))
    b.weight("table", 4, 4, dtype=torch.float32)
    b("cast = to.dtype", "table", torch.bfloat16)
    b("y = index_select", "cast", 0, "ids")
    after = fold_weights(b.captured("y"))
    assert text(after) == ["y = index_select(w_model.table@bfloat16, 0, ids)"]
    assert text(fold_weights(b.captured("y", "cast")))[0] == "cast = to.dtype(table, bfloat16)"


def test_values_that_are_no_weights_are_left() -> None:
    b = Build(x=(4,))
    b.weight("w", 4)
    b("y = add.Tensor", "x", 1.0)
    b("z = add.Tensor", "w", "x")
    b("v = add.Tensor", "w", 1.0, alpha=2)
    b("u = mul.Tensor", "w", 2.0)
    b("t = view.dtype", "w", torch.int32)
    b("folded = add.Tensor", "w", 1.0)
    before = b.captured("y", "z", "v", "u", "t", "folded")
    assert text(fold_weights(before)) == text(before)[:-1]
