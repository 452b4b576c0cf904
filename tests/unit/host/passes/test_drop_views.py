# SPDX-License-Identifier: Apache-2.0
"""Views that lie in memory as an earlier value does, and in-place changes of shape."""

from typing import Any

import pytest
import torch

from rbln_host.compiler.graph import Captured
from rbln_host.compiler.passes import drop_inplace_views, drop_views
from tests.unit.host.passes.build import Build, text

NOTHING: dict[str, tuple[Any, ...]] = {
    "dropout without loss": ("y = dropout", "x", 0.0, False),
    "dropout in use": ("y = dropout", "x", 0.5, False),
    "flatten of one axis": ("y = flatten.using_ints", "x", 1),
    "reshape to its shape": ("y = reshape", "x", [2, -1]),
    "view of its shape": ("y = view", "x", [-1, 6]),
    "cast to its dtype": ("y = to.dtype", "x", torch.float32),
    "slice of everything": ("y = slice.Tensor", "x", 1, 0, 9223372036854775807),
    "contiguous": ("y = contiguous", "x"),
    "split in one": ("y = split.Tensor", "x", 6, 1),
    "expand to its shape": ("y = expand", "x", [2, 6]),
}


@pytest.mark.parametrize("what", NOTHING)
def test_what_changes_nothing_is_its_input(what: str) -> None:
    b = Build(x=(2, 6))
    b(*NOTHING[what])
    b("out = relu", "y")
    before = b.captured("out")
    after = drop_views(before)
    assert text(after) == ["out = relu(x)"]
    b.assert_same(before, after)


def test_there_and_back() -> None:
    """As Qwen3 norms each head, between the linear and the rotary embedding."""
    b = Build(x=(2, 24))
    b("a = view", "x", [2, 4, 6])
    b("n = rbln::rms_norm", "a", None, 1e-6, 0)
    b("c = view", "n", [2, 24])
    b("d = view", "c", [2, -1, 6])
    b("e = transpose.int", "d", 0, 1)
    b("f = transpose.int", "e", 0, 1)
    b("out = relu", "f")
    before = b.captured("out")
    after = drop_views(before)
    assert text(after) == [
        "a = view(x, [2, 4, 6])",
        "n = rbln::rms_norm(a, None, 1e-06, 0)",
        "out = relu(n)",
    ]
    b.assert_same(before, after)


REAL: dict[str, tuple[Any, ...]] = {
    "another shape": ("y = view", "x", [3, 4]),
    "another part": ("y = slice.Tensor", "x", 0, 1, 2),
    "another order": ("y = transpose.int", "x", 0, 1),
    "another dtype": ("y = view.dtype", "x", torch.int32),
    "a copy": ("y = clone", "x"),
}


@pytest.mark.parametrize("what", REAL)
def test_what_changes_something_stays(what: str) -> None:
    b = Build(x=(2, 6))
    b(*REAL[what])
    before = b.captured("y")
    after = drop_views(before)
    assert text(after) == text(before)
    b.assert_same(before, after)


def test_equal_parts_of_one_value_are_one() -> None:
    b = Build(x=(2, 6))
    b("a, c = chunk", "x", 2, -1)
    b("d = slice.Tensor", "x", 1, 3, 6)
    b("out = add.Tensor", "c", "d")
    after = drop_views(b.captured("out"))
    assert text(after) == ["a, c = chunk(x, 2, -1)", "out = add.Tensor(c, c)"]


def test_a_command_stays_for_its_other_parts() -> None:
    b = Build(x=(2, 6))
    b("a = slice.Tensor", "x", 1, 0, 2)
    b("c, d = split_with_sizes", "x", [2, 4], 1)
    b("out = cat", ["a", "c", "d"], 1)
    before = b.captured("out")
    after = drop_views(before)
    assert text(after)[-1] == "out = cat([a, a, d], 1)"
    b.assert_same(before, after)


def test_a_write_in_place_stays_and_is_seen() -> None:
    b = Build(x=(2, 6), y=(2, 6))
    b("written = copy_", "x", "y")
    b("again = view", "written", [2, 6])
    b("out = relu", "again")
    before = b.captured("out")
    after = drop_views(before)
    assert text(after) == ["written = copy_(x, y)", "out = relu(x)"]
    b.assert_same(before, after)


def test_an_output_may_become_an_input() -> None:
    b = Build(x=(2, 6))
    b("y = dropout", "x", 0.0, False)
    after = drop_views(b.captured("y"))
    assert after.graph.outputs == ("x",)


class TestInPlaceViews:
    def test_become_views(self) -> None:
        b = Build(x=(2, 6))
        b("a = add.Tensor", "x", 1)
        b("up = unsqueeze_", "a", 0)
        b("turned = transpose_", "up", 1, 2)
        b("out = relu", "turned")
        before = b.captured("out")
        after = Captured(drop_inplace_views(before.graph), before.weights)
        assert text(after) == [
            "a = add.Tensor(x, 1)",
            "up = unsqueeze(a, 0)",
            "turned = transpose.int(up, 1, 2)",
            "out = relu(turned)",
        ]
        b.assert_same(before, after)

    def test_stay_where_the_changed_name_is_read(self) -> None:
        b = Build(x=(2, 6))
        b("a = add.Tensor", "x", 1)
        b("up = unsqueeze_", "a", 0)
        b("out = relu", "a")
        before = b.captured("out")
        assert drop_inplace_views(before.graph) == before.graph

    def test_leave_other_programs_as_they_are(self) -> None:
        b = Build(x=(2, 6))
        b("a = add_.Tensor", "x", 1)
        graph = b.captured("a").graph
        assert drop_inplace_views(graph) is graph
