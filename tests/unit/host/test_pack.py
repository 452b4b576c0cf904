# SPDX-License-Identifier: Apache-2.0
"""Packed weights: every element is where the kernels look for it, and comes back bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.pack import DTYPES, Layout, layout_of, pack, packed_weights, unpack

SIZES = st.integers(min_value=1, max_value=40)


def counted(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Elements that differ from each other and from zero, as far as the dtype can tell."""
    return (torch.arange(rows * width) % 251 + 1).view(rows, width).to(dtype)


def place(dtype: torch.dtype, o: int, k: int) -> tuple[int, ...]:
    """Where the description says that an element is."""
    return (o // 16, k // 2, o % 16, k % 2) if dtype == torch.bfloat16 else (o // 16, k, o % 16)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=SIZES, width=SIZES)
@settings(max_examples=30)
def test_elements_are_where_the_description_says(dtype: torch.dtype, rows: int, width: int) -> None:
    weight = counted(rows, width, dtype)
    packed = pack(weight)
    expected = torch.zeros(Layout.ROWS16.shape(TensorSpec((rows, width), dtype)), dtype=dtype)
    for o in range(rows):
        for k in range(width):
            expected[place(dtype, o, k)] = weight[o, k]
    assert packed.is_contiguous()
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=SIZES, width=SIZES)
@settings(max_examples=30)
def test_comes_back(dtype: torch.dtype, rows: int, width: int) -> None:
    weight = counted(rows, width, dtype)
    assert torch.equal(unpack(pack(weight), rows, width), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype: torch.dtype) -> None:
    base = counted(48, 70, dtype)
    for view in (base.t(), base[3:35, 1:], base[:, ::2], base[5:, 3:66], base[:1].expand(32, 70)):
        assert torch.equal(pack(view), pack(view.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(16, 8), (17, 7), (5, 1)])
def test_experts_one_after_the_other(dtype: torch.dtype, rows: int, width: int) -> None:
    weights = torch.stack([counted(rows, width, dtype) + number for number in range(3)])
    packed = pack(weights.transpose(1, 2).contiguous().transpose(1, 2))
    assert tuple(packed.shape) == Layout.ROWS16.shape(TensorSpec((3, rows, width), dtype))
    for expert in range(3):
        assert torch.equal(packed[expert], pack(weights[expert]))
    assert torch.equal(unpack(packed, 3, rows, width), weights)
    with pytest.raises(ValueError, match="does not hold"):
        unpack(packed, 2, rows, width)


def test_keeps_every_bit() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(256, 256)
    weight = bits.view(torch.bfloat16)
    assert torch.equal(unpack(pack(weight), 256, 256).view(torch.int16), bits)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4),
        torch.zeros(2, 3, 4, 5),
        torch.zeros(2, 0, 4),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.zeros(3, 0),
    ],
)
def test_what_cannot_be_packed(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be packed"):
        pack(weight)


def test_another_shape_is_not_unpacked() -> None:
    packed = pack(torch.ones(20, 6))
    assert unpack(packed, 17, 6).shape == (17, 6), "the same padded shape"
    for rows, width in ((16, 6), (33, 6), (20, 5)):
        with pytest.raises(ValueError, match="does not hold"):
            unpack(packed, rows, width)


def test_layout_of_a_stored_weight() -> None:
    matrix, vector = TensorSpec((4, 4), torch.float32), TensorSpec((4,), torch.float32)
    assert layout_of(matrix, packed=True) is Layout.ROWS16
    assert layout_of(matrix, packed=False) is Layout.PLAIN
    assert layout_of(vector, packed=True) is Layout.PLAIN


def test_weights_of_linear_commands_are_packed() -> None:
    """Named directly: not a view of a weight, not a value that is computed."""
    x = TensorSpec((2, 4), torch.float32)

    def linear(weight: str, out: str) -> Command:
        args = (Ref("x"), Ref(weight), None, None, "none")
        return Command("rbln::linear", "default", args, {}, (out,))

    gated = Command("rbln::gated_linear", "default", (Ref("x"), Ref("g"), None, "silu"), {}, ("c",))
    view = Command("aten::t", "default", (Ref("v"),), {}, ("v_t",))
    table = Command("aten::embedding", "default", (Ref("w"), Ref("ids")), {}, ("d",))
    graph = Graph(
        "p",
        {"x": x, "ids": TensorSpec((2,), torch.int64)},
        {"w": "tied", "g": "gate_up", "v": "viewed", "n": "norm"},
        (linear("w", "a"), gated, view, linear("v_t", "b"), table),
        ("a", "b", "c", "d"),
    )
    assert packed_weights(graph) == {"tied", "gate_up"}
