# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as vLLM writes them, and the write of the KV pool behind them."""

import pytest
import torch

from rbln_host.compiler.passes import fuse_rotary, fuse_rotary_write, lower
from tests.unit.host.passes.build import Build, operators, text

END = 9223372036854775807
POSITIONS = torch.tensor([2, 0, 7])
ROUND_ONCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


def build(dtype: torch.dtype = torch.float32, *, size: int = 8) -> Build:
    b = Build(dtype, x=(3, 2, size), y=(3, 2, size), z=(3, 3, 8, 8), positions=POSITIONS)
    b.weight("table", 9, 8)
    b("rows = index_select", "table", 0, "positions")
    b("cos, sin = chunk", "rows", 2, -1)
    b("c = unsqueeze", "cos", -2)
    b("s = unsqueeze", "sin", -2)
    return b


def turn(b: Build, name: str, source: str, *, neox: bool = True) -> None:
    """``name`` = ``source`` rotated, as ``ApplyRotaryEmb.forward_static`` of vLLM does."""
    one, two = f"{name}1", f"{name}2"
    if neox:
        b(f"{one}, {two} = chunk", source, 2, -1)
    else:
        b(f"{one} = slice.Tensor", source, 2, 0, END, 2)
        b(f"{two} = slice.Tensor", source, 2, 1, END, 2)
    b(f"{name}3 = mul.Tensor", one, "c")
    b(f"{name}4 = mul.Tensor", two, "s")
    b(f"{name}5 = sub.Tensor", f"{name}3", f"{name}4")
    b(f"{name}6 = mul.Tensor", two, "c")
    b(f"{name}7 = mul.Tensor", one, "s")
    b(f"{name}8 = add.Tensor", f"{name}6", f"{name}7")
    pieces = [f"{name}5", f"{name}8"]
    if neox:
        b(f"{name} = cat", pieces, -1)
    else:
        b(f"{name}9 = stack", pieces, -1)
        b(f"{name} = flatten.using_ints", f"{name}9", -2)


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
@pytest.mark.parametrize("neox", [True, False])
def test_whole_heads(dtype: torch.dtype, *, neox: bool) -> None:
    b = build(dtype)
    turn(b, "q", "x", neox=neox)
    turn(b, "k", "y", neox=neox)
    before = b.captured("q", "k")
    after = fuse_rotary(before)
    assert text(after) == [
        f"q = rbln::rotary_embedding(x, positions, table, {neox})",
        f"k = rbln::rotary_embedding(y, positions, table, {neox})",
    ]
    b.assert_same(before, after, ROUND_ONCE[dtype])


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("neox", [True, False])
def test_the_first_features_of_heads(size: int, *, neox: bool) -> None:
    """With nothing left over vLLM joins a piece of no size."""
    b = build(size=size)
    b("part = slice.Tensor", "x", 2, 0, 8)
    b("rest = slice.Tensor", "x", 2, 8, END)
    turn(b, "r", "part", neox=neox)
    b("q = cat", ["r", "rest"], -1)
    before = b.captured("q")
    after = fuse_rotary(before)
    assert text(after) == [f"q = rbln::rotary_embedding(x, positions, table, {neox})"]
    b.assert_same(before, after, 1e-6)


def test_other_features_behind_are_joined_still() -> None:
    b = build(size=12)
    b("part = slice.Tensor", "x", 2, 0, 8)
    b("rest = slice.Tensor", "y", 2, 8, END)
    turn(b, "r", "part")
    b("q = cat", ["r", "rest"], -1)
    before = b.captured("q")
    after = fuse_rotary(before)
    assert operators(after) == ["rbln::rotary_embedding", "cat"]
    b.assert_same(before, after, 1e-6)


def left_alone(b: Build, *outputs: str) -> None:
    before = b.captured(*outputs)
    after = fuse_rotary(before)
    assert not any("rotary" in line for line in text(after))
    b.assert_same(before, after)


def test_a_part_that_is_read_elsewhere() -> None:
    b = build()
    turn(b, "q", "x")
    left_alone(b, "q", "q3")


def test_sines_and_cosines_changed_round() -> None:
    b = build()
    b("swap, swap2 = chunk", "rows", 2, -1)
    b.commands[2:4] = []
    b("c = unsqueeze", "swap2", -2)
    b("s = unsqueeze", "swap", -2)
    turn(b, "q", "x")
    left_alone(b, "q")


def test_the_other_direction() -> None:
    b = build()
    b("q1, q2 = chunk", "x", 2, -1)
    b("q3 = mul.Tensor", "q1", "c")
    b("q4 = mul.Tensor", "q2", "s")
    b("q5 = add.Tensor", "q3", "q4")
    b("q6 = mul.Tensor", "q2", "c")
    b("q7 = mul.Tensor", "q1", "s")
    b("q8 = sub.Tensor", "q6", "q7")
    b("q = cat", ["q5", "q8"], -1)
    left_alone(b, "q")


def test_halves_of_two_values() -> None:
    b = build()
    b("q1, _ = chunk", "x", 2, -1)
    b("_, q2 = chunk", "y", 2, -1)
    b("q3 = mul.Tensor", "q1", "c")
    b("q4 = mul.Tensor", "q2", "s")
    b("q5 = sub.Tensor", "q3", "q4")
    b("q6 = mul.Tensor", "q2", "c")
    b("q7 = mul.Tensor", "q1", "s")
    b("q8 = add.Tensor", "q6", "q7")
    b("q = cat", ["q5", "q8"], -1)
    left_alone(b, "q")


def test_a_table_that_is_computed() -> None:
    b = Build(x=(3, 2, 8), positions=POSITIONS)
    b.weight("w", 9, 8)
    b("table = neg", "w")
    b("rows = index_select", "table", 0, "positions")
    b("cos, sin = chunk", "rows", 2, -1)
    b("c = unsqueeze", "cos", -2)
    b("s = unsqueeze", "sin", -2)
    turn(b, "q", "x")
    left_alone(b, "q")


def test_a_table_of_another_dtype() -> None:
    b = Build(torch.bfloat16, x=(3, 2, 8), positions=POSITIONS)
    b.weight("table", 9, 8, dtype=torch.float32)
    b("rows = index_select", "table", 0, "positions")
    b("cos, sin = chunk", "rows", 2, -1)
    b("c = unsqueeze", "cos", -2)
    b("s = unsqueeze", "sin", -2)
    turn(b, "q", "x")
    left_alone(b, "q")


@pytest.mark.parametrize(
    ("tokens", "columns", "axis", "positions"),
    [
        (3, 2, 0, POSITIONS),  # one angle for all features
        (3, 8, 0, POSITIONS[:1]),  # one position for all tokens
        (8, 8, 1, torch.tensor([2, 0, 7, 1, 3, 4, 5, 6])),  # columns in another order
    ],
)
def test_other_lookups(tokens: int, columns: int, axis: int, positions: torch.Tensor) -> None:
    b = Build(x=(tokens, 2, 8), positions=positions)
    b.weight("table", 8, columns)
    b("rows = index_select", "table", axis, "positions")
    b("cos, sin = chunk", "rows", 2, -1)
    b("c = unsqueeze", "cos", -2)
    b("s = unsqueeze", "sin", -2)
    turn(b, "q", "x")
    left_alone(b, "q")


def test_features_joined_behind_something_else() -> None:
    b = build(size=12)
    b("part = slice.Tensor", "x", 2, 0, 8)
    b("rest = slice.Tensor", "x", 2, 8, END)
    b("r = rbln::rms_norm", "part", None, 1e-6, 0)
    b("q = cat", ["r", "rest"], -1)
    left_alone(b, "q")


def test_doubles() -> None:
    b = build(torch.float64)
    turn(b, "q", "x")
    left_alone(b, "q")


def test_rows_for_more_than_tokens() -> None:
    """The angles are those of the second axis here."""
    b = build()
    turn(b, "q", "z")
    left_alone(b, "q")


def test_pairs_put_together_in_another_way() -> None:
    b = build()
    turn(b, "q", "x", neox=False)
    b("other = cat", ["q5", "q8"], -1)
    b("flat = view", "other", [3, 2, 8])
    b.commands = [c for c in b.commands if c.outputs not in {("q9",), ("q",)}]
    left_alone(b, "flat")


def test_pairs_put_into_another_shape() -> None:
    b = build()
    turn(b, "q", "x", neox=False)
    b("flat = reshape", "q9", [3, 16])
    b.commands = [c for c in b.commands if c.outputs != ("q",)]
    left_alone(b, "flat")


def test_a_value_that_is_written_to() -> None:
    b = build()
    turn(b, "q", "x")
    b("_ = mul_.Tensor", "x", 2.0)
    left_alone(b, "q")


def test_a_table_that_is_cast_is_cast_once() -> None:
    b = Build(torch.bfloat16, x=(3, 2, 8), positions=POSITIONS)
    b.weight("wide", 9, 8, dtype=torch.float32)
    b("table = to.dtype", "wide", torch.bfloat16)
    b("rows = index_select", "table", 0, "positions")
    b("cos, sin = chunk", "rows", 2, -1)
    b("c = unsqueeze", "cos", -2)
    b("s = unsqueeze", "sin", -2)
    turn(b, "q", "x")
    before = b.captured("q")
    after = lower(before)
    table = "w_model.wide@bfloat16"
    assert text(after) == [f"q = rbln::rotary_embedding(x, positions, {table}, True)"]
    b.assert_same(before, after, 1.6e-2)


class TestWrite:
    """``write_kv`` of a rotated key, with the rotation of the query."""

    def build(self) -> Build:
        b = Build(
            x=(3, 2, 8),
            k=(3, 1, 8),
            v=(3, 1, 8),
            kv=(2, 1, 4, 16),
            positions=POSITIONS,
            other=POSITIONS + 1,
            slots=torch.tensor([5, -1, 0]),
        )
        b.weight("table", 9, 8)
        return b

    def rotate(self, b: Build, name: str, source: str, positions: str = "positions") -> None:
        b(f"{name} = rbln::rotary_embedding", source, positions, "table", True)

    def write(self, b: Build, key: str = "rk") -> None:
        b("rbln::write_kv", key, "v", "kv", "slots")

    @pytest.mark.parametrize("order", ["qk", "kq"])
    def test_fused(self, order: str) -> None:
        b = self.build()
        for letter in order:
            self.rotate(b, f"r{letter}", {"q": "x", "k": "k"}[letter])
        self.write(b)
        b("out = neg", "rq")
        before = b.captured("out")
        after = fuse_rotary_write(before)
        assert text(after) == [
            "rq = rbln::rotary_write_kv(x, k, v, positions, table, kv, slots, True)",
            "out = neg(rq)",
        ]
        b.assert_same(before, after)

    def left_alone(self, b: Build, *outputs: str) -> None:
        before = b.captured(*outputs)
        after = fuse_rotary_write(before)
        assert text(after) == text(before)
        b.assert_same(before, after)

    def test_a_query_that_is_read_before_the_write(self) -> None:
        b = self.build()
        self.rotate(b, "rq", "x")
        b("out = neg", "rq")
        self.rotate(b, "rk", "k")
        self.write(b)
        self.left_alone(b, "out", "rq")

    def test_a_key_that_is_read_elsewhere(self) -> None:
        b = self.build()
        self.rotate(b, "rq", "x")
        self.rotate(b, "rk", "k")
        self.write(b)
        self.left_alone(b, "rq", "rk")

    def test_a_query_at_other_positions(self) -> None:
        b = self.build()
        self.rotate(b, "rq", "x", "other")
        self.rotate(b, "rk", "k")
        self.write(b)
        self.left_alone(b, "rq")

    def test_a_key_alone(self) -> None:
        b = self.build()
        self.rotate(b, "rk", "k")
        self.write(b)
        self.left_alone(b, "x")

    def test_a_key_that_is_not_rotated(self) -> None:
        b = self.build()
        self.rotate(b, "rq", "x")
        self.write(b, "k")
        self.left_alone(b, "rq")

    def test_a_query_that_changes(self) -> None:
        b = self.build()
        self.rotate(b, "rq", "x")
        self.rotate(b, "rk", "k")
        b("_ = mul_.Tensor", "x", 2.0)
        self.write(b)
        self.left_alone(b, "rq")
