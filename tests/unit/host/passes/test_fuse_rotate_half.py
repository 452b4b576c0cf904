# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as Hugging Face writes them."""

import pytest
import torch

from rbln_host.compiler.passes import fuse_rotate_half
from tests.unit.host.passes.build import Build, operators, text

END = 9223372036854775807
ROUND_ONCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


def build(dtype: torch.dtype = torch.float32, *, size: int = 8) -> Build:
    """``x`` and ``y`` are ``[1, heads, N, size]`` and 8 features have angles."""
    b = Build(dtype, q=(1, 3, 2, size), k=(1, 3, 1, size), angles=torch.rand(1, 3, 4))
    b("x = transpose.int", "q", 1, 2)
    b("y = transpose.int", "k", 1, 2)
    b("twice = cat", ["angles", "angles"], -1)
    for name in ("cos", "sin"):
        b(f"{name}1 = {name}", "twice")
        b(f"{name}2 = mul.Tensor", f"{name}1", 1.5)
        last = f"{name}2"
        if dtype != torch.float32:
            b(f"{name}3 = to.dtype", last, dtype)
            last = f"{name}3"
        b(f"{name[0]} = unsqueeze", last, 1)
    return b


def turn(b: Build, name: str, source: str) -> None:
    """``name`` = ``source * cos + rotate_half(source) * sin``."""
    b(f"{name}1 = mul.Tensor", source, "c")
    b(f"{name}2 = slice.Tensor", source, 3, 0, 4)
    b(f"{name}3 = slice.Tensor", source, 3, 4, 8)
    b(f"{name}4 = neg", f"{name}3")
    b(f"{name}5 = cat", [f"{name}4", f"{name}2"], -1)
    b(f"{name}6 = mul.Tensor", f"{name}5", "s")
    b(f"{name} = add.Tensor", f"{name}1", f"{name}6")


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
def test_query_and_key_share_a_table(dtype: torch.dtype) -> None:
    b = build(dtype)
    turn(b, "rq", "x")
    turn(b, "rk", "y")
    before = b.captured("rq", "rk")
    after = fuse_rotate_half(before)
    lines = text(after)
    start = lines.index("c_half = slice.Tensor(c, 3, 0, 4)")
    assert lines[start:] == [
        "c_half = slice.Tensor(c, 3, 0, 4)",
        "s_half = slice.Tensor(s, 3, 0, 4)",
        "c_s = cat([c_half, s_half], -1)",
        "c_s_table = view(c_s, [3, 8])",
        "rq_turned = transpose.int(x, 1, 2)",
        "rq_flat = select.int(rq_turned, 0, 0)",
        "rq_rotary = rbln::rotary_embedding(rq_flat, w_arange.3, c_s_table, True)",
        "rq_up = unsqueeze(rq_rotary, 0)",
        "rq = transpose.int(rq_up, 1, 2)",
        "rk_turned = transpose.int(y, 1, 2)",
        "rk_flat = select.int(rk_turned, 0, 0)",
        "rk_rotary = rbln::rotary_embedding(rk_flat, w_arange.3, c_s_table, True)",
        "rk_up = unsqueeze(rk_rotary, 0)",
        "rk = transpose.int(rk_up, 1, 2)",
    ]
    assert after.weights["arange.3"].tolist() == [0, 1, 2]
    b.assert_same(before, after, ROUND_ONCE[dtype])


def test_the_first_features_of_heads() -> None:
    b = build(size=12)
    b("part = slice.Tensor", "x", 3, 0, 8)
    b("rest = slice.Tensor", "x", 3, 8, END)
    turn(b, "r", "part")
    b("out = cat", ["r", "rest"], -1)
    before = b.captured("out")
    after = fuse_rotate_half(before)
    assert operators(after)[-2:] == ["cat", "rbln::rotary_embedding"]
    b.assert_same(before, after, 1e-6)


def left_alone(b: Build, *outputs: str) -> None:
    before = b.captured(*outputs)
    after = fuse_rotate_half(before)
    assert not any("rotary" in line for line in text(after))
    b.assert_same(before, after)


def test_a_part_that_is_read_elsewhere() -> None:
    b = build()
    turn(b, "r", "x")
    left_alone(b, "r", "r6")


def test_the_first_half_negated() -> None:
    b = build()
    b("r1 = mul.Tensor", "x", "c")
    b("r2 = slice.Tensor", "x", 3, 0, 4)
    b("r3 = slice.Tensor", "x", 3, 4, 8)
    b("r4 = neg", "r2")
    b("r5 = cat", ["r4", "r3"], -1)
    b("r6 = mul.Tensor", "r5", "s")
    b("r = add.Tensor", "r1", "r6")
    left_alone(b, "r")


def test_angles_that_are_not_each_there_twice() -> None:
    b = Build(q=(1, 3, 2, 8), angles=torch.rand(1, 3, 4), others=torch.rand(1, 3, 4))
    b("x = transpose.int", "q", 1, 2)
    b("twice = cat", ["angles", "others"], -1)
    for name in ("cos", "sin"):
        b(f"{name}1 = {name}", "twice")
        b(f"{name[0]} = unsqueeze", f"{name}1", 1)
    turn(b, "r", "x")
    left_alone(b, "r")


def test_angles_scaled_by_a_value() -> None:
    """A factor for each feature would make the two halves differ."""
    b = Build(q=(1, 3, 2, 8), angles=torch.rand(1, 3, 4), scale=(8,))
    b("x = transpose.int", "q", 1, 2)
    b("twice = cat", ["angles", "angles"], -1)
    for name in ("cos", "sin"):
        b(f"{name}1 = {name}", "twice")
        b(f"{name}2 = mul.Tensor", f"{name}1", "scale")
        b(f"{name[0]} = unsqueeze", f"{name}2", 1)
    turn(b, "r", "x")
    left_alone(b, "r")


def angles(b: Build, name: str, source: str) -> None:
    b(f"{name}0 = cat", [source, source], -1)
    b(f"{name}1 = {name}", f"{name}0")
    b(f"{name[0]} = unsqueeze", f"{name}1", 1)


@pytest.mark.parametrize(
    ("batch", "cosines", "sines"),
    [
        (2, (2, 3, 4), (2, 3, 4)),  # several sequences
        (2, (1, 3, 4), (1, 3, 4)),  # several sequences, at the same positions
        (1, (1, 1, 4), (1, 3, 4)),  # all tokens at one position, for cosines
        (1, (1, 3, 4), (1, 1, 4)),
    ],
)
def test_angles_for_more_than_each_token(
    batch: int, cosines: tuple[int, ...], sines: tuple[int, ...]
) -> None:
    b = Build(q=(batch, 3, 2, 8), a=cosines, o=sines)
    b("x = transpose.int", "q", 1, 2)
    angles(b, "cos", "a")
    angles(b, "sin", "o")
    turn(b, "r", "x")
    left_alone(b, "r")


def test_doubles() -> None:
    b = Build(torch.float64, q=(1, 3, 2, 8), a=(1, 3, 4))
    b("x = transpose.int", "q", 1, 2)
    angles(b, "cos", "a")
    angles(b, "sin", "a")
    turn(b, "r", "x")
    left_alone(b, "r")


def test_another_function_than_the_negative() -> None:
    b = build()
    b("other = neg", "x")
    turn(b, "r", "x")
    at = next(i for i, c in enumerate(b.commands) if c.outputs == ("r4",))
    b("r4 = abs", "r3")
    b.commands[at] = b.commands.pop()
    left_alone(b, "r", "other")


def test_angles_in_another_order() -> None:
    b = Build(q=(1, 3, 2, 8), a=(1, 3, 4))
    b("x = transpose.int", "q", 1, 2)
    angles(b, "sin", "a")
    b("twice = cat", ["a", "a"], -1)
    b("other = cumsum", "twice", -1)
    b("cosines = cos", "other")
    b("c = unsqueeze", "cosines", 1)
    turn(b, "r", "x")
    left_alone(b, "r")


def test_a_value_that_is_written_to() -> None:
    b = build()
    turn(b, "r", "x")
    b("_ = mul_.Tensor", "q", 2.0)
    left_alone(b, "r")


def test_a_rotation_that_is_read_elsewhere_too_is_made_once() -> None:
    b = build(size=12)
    b("part = slice.Tensor", "x", 3, 0, 8)
    b("rest = slice.Tensor", "x", 3, 8, END)
    turn(b, "r", "part")
    b("out = cat", ["r", "rest"], -1)
    before = b.captured("out", "r")
    after = fuse_rotate_half(before)
    assert text(after)[-1] == "out = cat([r, rest], -1)"
    assert len([line for line in text(after) if "rotary_embedding" in line]) == 1
    b.assert_same(before, after, 1e-6)


def test_tokens_joined_behind_are_joined_still() -> None:
    b = build(size=16)
    b("part, rest = chunk", "x", 2, -1)
    turn(b, "r", "part")
    b("out = cat", ["r", "rest"], 2)
    before = b.captured("out")
    after = fuse_rotate_half(before)
    assert text(after)[-1] == "out = cat([r, rest], 2)"
    b.assert_same(before, after, 1e-6)


def test_cosines_of_a_wider_dtype() -> None:
    b = Build(torch.bfloat16, q=(1, 3, 2, 8), angles=torch.rand(1, 3, 4))
    b("x = transpose.int", "q", 1, 2)
    b("twice = cat", ["angles", "angles"], -1)
    for name in ("cos", "sin"):
        b(f"{name}1 = {name}", "twice")
        b(f"{name[0]} = unsqueeze", f"{name}1", 1)
    turn(b, "r", "x")
    left_alone(b, "r")


def looked_up(*, first: str = "c", second: str = "s") -> Build:
    """Cosines and sines are rows of a weight, as one table of all positions has them."""
    b = Build(q=(1, 3, 2, 8), k=(1, 3, 1, 8), places=torch.tensor([4, 0, 2]))
    b.weight("table", 5, 8)
    b("x = transpose.int", "q", 1, 2)
    b("y = transpose.int", "k", 1, 2)
    b("rows = index_select", "table", 0, "places")
    b(f"{first}0 = slice.Tensor", "rows", 1, 0, 4)
    b(f"{second}0 = slice.Tensor", "rows", 1, 4, 8)
    for name in ("c", "s"):
        b(f"{name}1 = cat", [f"{name}0", f"{name}0"], -1)
        b(f"{name}2 = unsqueeze", f"{name}1", 0)
        b(f"{name} = unsqueeze", f"{name}2", 1)
    return b


def test_rows_of_a_weight_are_the_table() -> None:
    b = looked_up()
    turn(b, "rq", "x")
    turn(b, "rk", "y")
    before = b.captured("rq", "rk")
    after = fuse_rotate_half(before)
    lines = text(after)
    for name in ("rq", "rk"):
        assert f"{name}_rotary = rbln::rotary_embedding({name}_flat, places, table, True)" in lines
    assert not any("cat" in line or "index_select" in line for line in lines)
    b.assert_same(before, after, 1e-6)


def test_rows_with_the_sines_first_are_no_table() -> None:
    b = looked_up(first="s", second="c")
    turn(b, "r", "x")
    before = b.captured("r")
    after = fuse_rotate_half(before)
    assert any("rotary_embedding(r_flat, w_arange.3, c_s_table, True)" in x for x in text(after))
    b.assert_same(before, after, 1e-6)
