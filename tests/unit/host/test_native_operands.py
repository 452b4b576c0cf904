# SPDX-License-Identifier: Apache-2.0
"""Operands: axes are joined, dropped and spread without moving an element."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.plan import Kind
from rbln_host.runtime.native.operands import (
    Base,
    Operand,
    coalesced,
    rows_of,
    weight_operand,
)

BASE = Base(Kind.ARENA, nbytes=1 << 20)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def operand(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Operand:
    return Operand(BASE, offset, torch.float32, shape, strides)


def of(tensor: torch.Tensor) -> Operand:
    """Where a tensor's elements lie, from the start of its storage."""
    return operand(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) * 4)


def addresses(item: Operand) -> list[int]:
    """Byte addresses of the elements in row-major order."""
    axes = [range(size) for size in item.shape]
    return [
        item.offset + 4 * sum(i * s for i, s in zip(index, item.strides, strict=True))
        for index in itertools.product(*axes)
    ]


@st.composite
def operands(draw: st.DrawFn, count: int) -> list[Operand]:
    """Operands of one shape: views of larger tensors, permuted, stepped or broadcast."""
    shape = draw(SHAPES)
    found = []
    for _ in range(count):
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.integers(1, 2)) for _ in shape]
        large = torch.empty([shape[axis] * steps[axis] for axis in order])
        view = large.permute([order.index(axis) for axis in range(len(shape))])
        for axis, step in enumerate(steps):
            view = view[(slice(None),) * axis + (slice(None, None, step),)]
        flat = [draw(st.booleans()) for _ in shape]
        parts = tuple(slice(0, 1) if f else slice(None) for f in flat)
        found.append(of(view[parts].expand(shape)))
    return found


class TestCoalesced:
    @given(operands(3))
    @settings(max_examples=200)
    def test_elements_stay_where_they_are_and_meet_the_same_others(
        self, given: list[Operand]
    ) -> None:
        found = coalesced(*given)
        assert len({item.shape for item in found}) == 1
        assert len(found[0].shape) <= len(given[0].shape)
        for before, after in zip(given, found, strict=True):
            assert addresses(before) == addresses(after)

    def test_contiguous_becomes_one_axis(self) -> None:
        assert coalesced(of(torch.empty(2, 3, 4)))[0].shape == (24,)

    def test_a_broadcast_row_stays_apart(self) -> None:
        row = of(torch.empty(4)).expanded((3, 4))
        left, right = coalesced(row, of(torch.empty(3, 4)))
        assert (left.shape, left.strides) == ((3, 4), (0, 1))
        assert right.strides == (4, 1)

    def test_a_scalar_is_one_element(self) -> None:
        found = coalesced(operand((), ()))[0]
        assert (found.shape, found.strides) == ((1,), (1,))


class TestRows:
    @given(operands(2))
    @settings(max_examples=200)
    def test_elements_stay_where_they_are(self, given: list[Operand]) -> None:
        found = rows_of(*given)
        merged = [len(item.shape) == 2 for item in found]
        assert all(merged) or found == given
        for before, after in zip(given, found, strict=True):
            assert addresses(before) == addresses(after)
            assert after.shape[-1] == before.shape[-1]

    def test_leading_axes_become_one(self) -> None:
        inner = of(torch.empty(2, 3, 8)[:, :, :4])
        (found,) = rows_of(inner)
        assert (found.shape, found.strides) == ((6, 4), (8, 1))

    def test_a_vector_is_one_row(self) -> None:
        (found,) = rows_of(of(torch.empty(5)))
        assert (found.shape, found.strides) == ((1, 5), (5, 1))

    def test_uneven_rows_stay(self) -> None:
        uneven = of(torch.empty(2, 4, 8)[:, :3])
        assert rows_of(uneven, of(torch.empty(2, 3, 8)))[0] == uneven
        assert len(rows_of(uneven, of(torch.empty(2, 3, 8)))[1].shape) == 3

    def test_no_rows(self) -> None:
        (found,) = rows_of(of(torch.empty(2, 0, 8)))
        assert found.shape == (0, 8)


class TestOthers:
    @given(SHAPES)
    def test_contiguous_is_what_torch_calls_so(self, shape: tuple[int, ...]) -> None:
        tensor = torch.empty(shape)
        assert of(tensor).is_contiguous
        moved = tensor.transpose(0, -1)
        assert of(moved).is_contiguous == moved.is_contiguous()

    def test_viewed(self) -> None:
        assert of(torch.empty(2, 6)).viewed((3, 4)) == of(torch.empty(3, 4))
        assert of(torch.empty(2, 6)).viewed((3, 5)) is None
        assert of(torch.empty(2, 6).t()).viewed((3, 4)) is None

    def test_expanded(self) -> None:
        tensor = torch.empty(3, 1)
        assert of(tensor).expanded((2, 3, 4)) == of(tensor.expand(2, 3, 4))
        for shape in ((3, 2, 4), (3,)):
            with pytest.raises(ValueError, match="cannot be expanded"):
                of(tensor).expanded(shape)

    def test_part_and_inserted(self) -> None:
        tensor = torch.empty(4, 6)
        assert of(tensor).part(1, 2, 3) == of(tensor[:, 2:5])
        assert addresses(of(tensor).inserted(1)) == addresses(of(tensor.unsqueeze(1)))
        assert of(tensor).inserted(1).shape == (4, 1, 6)

    def test_a_packed_weight(self) -> None:
        found = weight_operand("w", TensorSpec((20, 7), torch.bfloat16), Layout.ROWS16)
        assert (found.shape, found.strides) == ((2, 4, 16, 2), (128, 32, 2, 1))
        assert found.base == Base(Kind.WEIGHT, "w", Layout.ROWS16, 2 * 4 * 16 * 2 * 2)

    def test_a_stride_for_each_axis(self) -> None:
        with pytest.raises(ValueError, match="strides"):
            operand((2, 3), (1,))
