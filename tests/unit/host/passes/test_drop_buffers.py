# SPDX-License-Identifier: Apache-2.0
"""Buffers that one copy fills become what is copied."""

from collections.abc import Callable

import pytest
import torch

from rbln_host.compiler.passes import drop_buffers
from tests.unit.host.passes.build import Build, text


def attention_output(b: Build, *, source: str = "attended") -> None:
    """As vLLM's attention layer hands its result over."""
    b("attended = relu", "x")
    b("buffer = empty.memory_format", [2, 12], dtype=b.dtype, device=torch.device("cpu"))
    b("target = view", "buffer", [-1, 3, 4])
    b("filled = copy_", "target", source)


def test_the_copy_goes() -> None:
    b = Build(x=(2, 3, 4))
    attention_output(b)
    b("out = view", "filled", [-1, 12])
    before = b.captured("out")
    after = drop_buffers(before)
    assert text(after) == [
        "attended = relu(x)",
        "buffer = view(attended, [2, 12])",
        "target = view(buffer, [-1, 3, 4])",
        "out = view(target, [-1, 12])",
    ]
    b.assert_same(before, after)


def test_what_reads_the_buffer_by_its_own_name_reads_what_was_copied() -> None:
    b = Build(x=(2, 3, 4))
    attention_output(b)
    b("out = neg", "buffer")
    before = b.captured("out")
    after = drop_buffers(before)
    assert text(after) == [
        "attended = relu(x)",
        "buffer = view(attended, [2, 12])",
        "out = neg(buffer)",
    ]
    b.assert_same(before, after)


def _of_an_input(b: Build) -> None:
    attention_output(b, source="x")


def _read_before(b: Build) -> None:
    b("attended = relu", "x")
    b("buffer = empty.memory_format", [2, 3, 4], dtype=b.dtype)
    b("before = mul.Tensor", "buffer", 0.0)
    b("filled = copy_", "buffer", "attended")


def _written_to_later(b: Build) -> None:
    attention_output(b)
    b("_ = mul_.Tensor", "filled", 2.0)


def _filled_twice(b: Build) -> None:
    attention_output(b)
    b("_ = copy_", "target", "x")


def _filled_in_part(b: Build) -> None:
    b("attended = relu", "x")
    b("buffer = zeros", [4, 3, 4], dtype=b.dtype)
    b("whole = empty.memory_format", [4, 3, 4], dtype=b.dtype)
    b("target = slice.Tensor", "whole", 0, 0, 2)
    b("_ = copy_", "target", "attended")
    b("filled = slice.Tensor", "whole", 0, 0, 2)


def _of_another_dtype(b: Build) -> None:
    b("attended = relu", "x")
    b("buffer = empty.memory_format", [2, 3, 4], dtype=torch.bfloat16)
    b("filled = copy_", "buffer", "attended")


def _of_a_source_that_changes(b: Build) -> None:
    attention_output(b)
    b("_ = mul_.Tensor", "attended", 2.0)


def _of_a_turned_source(b: Build) -> None:
    b("attended = relu", "x")
    b("turned = transpose.int", "attended", 0, 1)
    b("buffer = empty.memory_format", [3, 2, 4], dtype=b.dtype)
    b("filled = copy_", "buffer", "turned")


def _of_a_row(b: Build) -> None:
    b("attended = relu", "x")
    b("row = slice.Tensor", "attended", 0, 0, 1)
    b("buffer = empty.memory_format", [2, 3, 4], dtype=b.dtype)
    b("filled = copy_", "buffer", "row")


def _of_a_turned_target(b: Build) -> None:
    b("attended = relu", "x")
    b("buffer = empty.memory_format", [3, 2, 4], dtype=b.dtype)
    b("target = transpose.int", "buffer", 0, 1)
    b("_ = copy_", "target", "attended")
    b("filled = neg", "buffer")


LEFT: list[Callable[[Build], None]] = [
    *(_of_an_input, _written_to_later, _filled_twice, _filled_in_part, _of_another_dtype),
    *(_of_a_source_that_changes, _of_a_turned_source, _of_a_turned_target, _of_a_row),
]


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_a_copy_stays(make: Callable[[Build], None]) -> None:
    b = Build(x=(2, 3, 4))
    make(b)
    before = b.captured("filled")
    after = drop_buffers(before)
    assert any("copy_" in line for line in text(after))
    assert any("empty" in line for line in text(after))
    b.assert_same(before, after)


def test_a_buffer_that_something_else_fills_stays() -> None:
    b = Build(x=(2, 3, 4))
    b("buffer = empty.memory_format", [2, 3, 4], dtype=b.dtype)
    b("_ = atan2_", "buffer", "x")
    b("other = empty.memory_format", [2, 3, 4], dtype=b.dtype)
    b("attended = relu", "x")
    b("filled = copy_", "other", "attended")
    after = drop_buffers(b.captured("buffer", "filled"))
    assert [line for line in text(after) if "buffer" in line] == [
        "buffer = empty.memory_format([2, 3, 4], dtype=float32)",
        "_ = atan2_(buffer, x)",
    ]
    assert not any("copy_" in line for line in text(after))


def test_a_buffer_that_is_read_before_stays() -> None:
    b = Build(x=(2, 3, 4))
    _read_before(b)
    before = b.captured("before", "filled")
    assert text(drop_buffers(before)) == text(before)
