# SPDX-License-Identifier: Apache-2.0
"""Passes: what each removes, what none may touch, and that a program computes the same after."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.aliases import written_values
from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.passes import drop_aliases, drop_unread, optimise, share_equal
from rbln_host.runtime.interpreter import Interpreter
from tests.unit.host.programs import call

SPEC = TensorSpec((4, 4), torch.float32)


def graph(*commands: Command, outputs: tuple[str, ...], weights: tuple[str, ...] = ()) -> Graph:
    return Graph("p", {"x": SPEC, "y": SPEC}, {w: w for w in weights}, commands, outputs)


def names(program: Graph) -> list[str | None]:
    return [command.outputs[0] if command.outputs else None for command in program.commands]


def run(program: Graph) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the inputs as the program leaves them."""
    inputs = {name: (torch.arange(16.0).view(4, 4) + i) for i, name in enumerate(program.inputs)}
    weights = {name: torch.full((4, 4), 0.5) for name in program.weights.values()}
    return list(Interpreter(program, weights).run(inputs)), inputs


def assert_same_result(one: Graph, other: Graph) -> None:
    ours, our_inputs = run(one)
    theirs, their_inputs = run(other)
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(our_inputs[n], their_inputs[n]) for n in our_inputs)


class TestDropAliases:
    def test_readers_read_the_source(self) -> None:
        before = graph(
            call("alias", "x", out="a", overload="default"),
            call("detach", "a", out="b", overload="default"),
            call("add", "b", "a", out="c"),
            outputs=("c", "b"),
        )
        after = drop_aliases(before)
        assert after.commands == (call("add", "x", "x", out="c"),)
        assert after.outputs == ("c", "x")

    def test_inside_lists(self) -> None:
        before = graph(
            call("detach", "x", out="a", overload="default"),
            Command("aten::cat", "default", ((Ref("a"), Ref("y")),), {}, ("b",)),
            outputs=("b",),
        )
        assert drop_aliases(before).commands[0].args == ((Ref("x"), Ref("y")),)

    def test_views_and_copies_stay(self) -> None:
        before = graph(
            call("clone", "x", out="a", overload="default"),
            call("view", "x", (16,), out="b", overload="default"),
            outputs=("a", "b"),
        )
        assert drop_aliases(before) == before


class TestShareEqual:
    def test_equal_commands_are_computed_once(self) -> None:
        before = graph(
            call("add", "x", "y", out="a"),
            call("add", "x", "y", out="b"),
            call("mul", "a", "a", out="c"),
            call("mul", "b", "b", out="d"),
            outputs=("c", "d"),
        )
        after = share_equal(before)
        assert names(after) == ["a", "c"]
        assert after.outputs == ("c", "c")
        assert_same_result(before, after)

    @pytest.mark.parametrize("pair", [(1, 1.0), (1, True), (0.0, -0.0), ("x", "y")])
    def test_arguments_that_only_look_equal_are_not(self, pair: tuple[Any, Any]) -> None:
        before = graph(
            call("add", "x", pair[0], out="a"),
            call("add", "x", pair[1], out="b"),
            outputs=("a", "b"),
        )
        assert share_equal(before) == before

    def test_other_overloads_and_keywords_are_not_equal(self) -> None:
        half = Command("aten::add", "Tensor", (Ref("x"), Ref("y")), {"alpha": 0.5}, ("b",))
        before = graph(call("add", "x", "y", out="a"), half, outputs=("a", "b"))
        assert share_equal(before) == before

    def test_members_of_tuples_are_joined(self) -> None:
        def split(*outputs: str | None) -> Command:
            return Command("aten::split", "Tensor", (Ref("x"), 1, 0), {}, outputs, True)

        before = graph(
            split("a", None, None, "d"),
            split("e", "f", None, None),
            call("add", "d", "f", out="g"),
            call("add", "a", "e", out="h"),
            outputs=("g", "h"),
        )
        after = share_equal(before)
        assert after.commands[0].outputs == ("a", "f", None, "d")
        assert after.commands[2].args == (Ref("a"), Ref("a"))
        assert_same_result(before, after)

    @pytest.mark.parametrize(
        "command",
        [
            lambda out: call("empty", (4, 4), out=out, overload="memory_format"),
            lambda out: call("empty_like", "x", out=out, overload="default"),
            lambda out: call("new_empty", "x", (4, 4), out=out, overload="default"),
            lambda out: call("rand", (4, 4), out=out, overload="default"),
            lambda out: call("rand_like", "x", out=out, overload="default"),
            lambda out: call("dropout", "x", 0.5, True, out=out, overload="default"),
        ],
    )
    def test_memory_and_chance_are_never_shared(self, command: Callable[[str], Command]) -> None:
        before = graph(command("a"), command("b"), outputs=("a", "b"))
        assert share_equal(before) == before

    def test_fresh_tensors_are_shared_until_one_is_written(self) -> None:
        zeros = [call("zeros", (4, 4), out=name, overload="default") for name in "ab"]
        shared = graph(*zeros, call("add", "a", "b", out="c"), outputs=("c",))
        assert names(share_equal(shared)) == ["a", "c"]
        written = graph(*zeros, call("add_", "b", 1, out="c"), outputs=("a", "b"))
        assert share_equal(written) == written


def write_kv(pool: str) -> Command:
    new = tuple(Ref(name) for name in ("new", "new", pool, "slots"))
    return Command("rbln::write_kv", "default", new, {}, ())


def read_kv(out: str, pool: str = "pool") -> Command:
    arguments = (Ref("new"), Ref(pool), Ref("table"), Ref("pos"), 1.0, 0, 0.0, None, None)
    return Command("rbln::paged_attention", "default", arguments, {}, (out,))


POOL_INPUTS = {
    "pool": TensorSpec((-1, 1, 2, 8), torch.float32),
    "new": TensorSpec((2, 1, 4), torch.float32),
    "slots": TensorSpec((2,), torch.int64),
    "table": TensorSpec((1, 1), torch.int32),
    "pos": TensorSpec((2,), torch.int32),
}


class TestReadsAcrossWrites:
    def test_of_the_pool_are_both_done(self) -> None:
        before = Graph(
            "p", POOL_INPUTS, {}, (read_kv("a"), write_kv("pool"), read_kv("b")), ("a", "b")
        )
        assert share_equal(before) == before

    def test_of_the_pool_given_by_keyword(self) -> None:
        key, value, pool, slots = write_kv("pool").args
        named = {"key_NHD": key, "value_NHD": value, "kv_cache": pool, "slots_N": slots}
        write = Command("rbln::write_kv", "default", (), named, ())
        before = Graph("p", POOL_INPUTS, {}, (read_kv("a"), write, read_kv("b")), ("a", "b"))
        assert share_equal(before) == before

    def test_of_a_view_of_the_pool(self) -> None:
        before = Graph(
            "p",
            POOL_INPUTS,
            {},
            (
                call("slice", "pool", 0, 1, out="part"),
                read_kv("a", "part"),
                write_kv("pool"),
                read_kv("b", "part"),
            ),
            ("a", "b"),
        )
        assert share_equal(before) == before

    def test_of_the_pool_written_through_a_view(self) -> None:
        before = Graph(
            "p",
            POOL_INPUTS,
            {},
            (
                read_kv("a"),
                call("slice", "pool", 0, 1, out="part"),
                write_kv("part"),
                read_kv("b"),
            ),
            ("a", "b"),
        )
        assert share_equal(before) == before

    def test_without_a_write_are_done_once(self) -> None:
        before = Graph("p", POOL_INPUTS, {}, (read_kv("a"), read_kv("b")), ("a", "b"))
        assert names(share_equal(before)) == ["a"]

    @pytest.mark.parametrize(
        "write",
        [
            (call("add_", "x", 1, out="w"),),
            (call("view", "x", (16,), out="v", overload="default"), call("mul_", "v", 2, out="w")),
            (
                Command("aten::unbind", "int", (Ref("x"),), {}, (None, "v", None, None), True),
                call("zero_", "v", out="w", overload="default"),
            ),
            (Command("aten::add", "out", (Ref("y"), Ref("y")), {"out": Ref("x")}, ("w",)),),
            # Operators that may return their input, although their schema does not say so.
            (
                call("dropout", "x", 0.5, False, out="v", overload="default"),
                call("add_", "v", 1, out="w"),
            ),
            (call("type_as", "x", "y", out="v", overload="default"), call("add_", "v", 1, out="w")),
            (
                Command("aten::einsum", "default", ("ij->ji", (Ref("x"),)), {}, ("v",)),
                call("add_", "v", 1, out="w"),
            ),
            (
                Command("aten::atleast_2d", "Sequence", ((Ref("x"),),), {}, ("v",), True),
                call("add_", "v", 1, out="w"),
            ),
        ],
    )
    def test_of_a_value_written_in_place(self, write: tuple[Command, ...]) -> None:
        first, second = (call("add", "x", 3, out=name) for name in "ab")
        before = graph(first, *write, second, outputs=("a", "b"))
        after = optimise(before)
        assert after.commands == before.commands
        (a, b), _ = run(after)
        assert not torch.equal(a, b)


class TestWrittenValues:
    def test_are_all_names_of_the_memory(self) -> None:
        program = graph(
            call("view", "x", (16,), out="v", overload="default"),
            call("t", "x", out="t", overload="default"),
            call("add", "x", 1, out="fresh"),
            call("add_", "v", 1, out="w"),
            outputs=("w",),
        )
        assert written_values(program) == {"x", "v", "t", "w"}

    def test_surely_counts_declared_sharing_only(self) -> None:
        program = graph(
            Command("aten::einsum", "default", ("ij,jk->ik", (Ref("x"), Ref("y"))), {}, ("e",)),
            call("add_", "e", 1, out="w"),
            outputs=("w",),
        )
        assert written_values(program) == {"x", "y", "e", "w"}
        assert written_values(program, surely=True) == {"e", "w"}


class TestDropUnread:
    def test_removes_chains_nobody_reads(self) -> None:
        before = graph(
            call("add", "x", "y", out="a"),
            call("mul", "x", "w", out="b"),
            call("mul", "b", "b", out="c"),
            call("empty", (9,), out="d", overload="memory_format"),
            outputs=("a",),
            weights=("w", "v"),
        )
        after = drop_unread(before)
        assert names(after) == ["a"]
        assert after.weights == {}
        assert after.inputs == before.inputs

    def test_keeps_writes_and_what_they_read(self) -> None:
        before = graph(
            call("mul", "y", 2, out="a"),
            call("view", "x", (16,), out="v", overload="default"),
            call("view", "a", (16,), out="b", overload="default"),
            call("copy_", "v", "b", out="c", overload="default"),
            outputs=("y",),
        )
        assert drop_unread(before) == before

    def test_keeps_random_draws_so_that_later_ones_are_the_same(self) -> None:
        before = graph(
            call("rand", (4, 4), out="a", overload="default"),
            call("rand", (4, 4), out="b", overload="default"),
            outputs=("b",),
        )
        assert drop_unread(before) == before


def plain(operator: str, *args: Any, out: str) -> Command:
    return call(operator, *args, out=out, overload="default")


def halves(a: str, b: str, out: str, both: bool) -> list[Command]:
    members = (f"{out}a", f"{out}b" if both else None)
    last = members[1] or members[0]
    return [
        Command("aten::split", "Tensor", (Ref(a), 2, 0), {}, members, True),
        call("sum", last, (0, 1), True, out=f"{out}s", overload="dim_IntList"),
        call("mul", f"{out}s", b, out=out),
    ]


def written_rows(a: str, b: str, out: str, _: bool) -> list[Command]:
    return [
        call("slice", a, 0, 1, 3, out=f"{out}s"),
        call("mul_", f"{out}s", 2, out=f"{out}w"),
        call("add", a, b, out=out),
    ]


def overwritten(a: str, b: str, out: str, _: bool) -> list[Command]:
    return [plain("clone", b, out=f"{out}c"), plain("copy_", a, f"{out}c", out=out)]


READS: tuple[Callable[[str, str, str, bool], list[Command]], ...] = (
    lambda a, b, out, _: [call("add", a, b, out=out)],
    lambda a, b, out, _: [call("mul", a, b, out=out)],
    lambda a, _, out, one: [call("add", a, 1 if one else 1.0, out=out)],
    lambda _, __, out, ___: [plain("zeros", (4, 4), out=out)],
    lambda a, _, out, __: [plain("alias", a, out=out)],
    lambda a, _, out, __: [plain("t", a, out=out)],
    lambda a, _, out, __: [plain("clone", a, out=out)],
    lambda a, _, out, __: [plain("dropout", a, 0.5, False, out=out)],
    halves,
)
WRITES: tuple[Callable[[str, str, str, bool], list[Command]], ...] = (
    lambda a, _, out, one: [call("add_", a, 1 if one else 0.5, out=out)],
    written_rows,
    overwritten,
)


@st.composite
def programs(draw: st.DrawFn) -> Graph:
    """Random commands over 4 x 4 values, with writes, views, repeats and unread results."""
    commands: list[Command] = []
    values = ["x", "y", "w"]
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(READS * 2 + WRITES))
        readable = st.sampled_from(values)
        first = readable.filter(lambda value: value != "w") if kind in WRITES else readable
        commands += kind(draw(first), draw(readable), f"v{index}", draw(st.booleans()))
        values.append(f"v{index}")
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return graph(*commands, outputs=tuple(outputs), weights=("w",))


@settings(max_examples=200)
@given(programs())
def test_optimised_programs_compute_the_same(program: Graph) -> None:
    if "w" in written_values(program):
        return  # capture refuses programs that write to a weight
    optimised = optimise(program)
    assert len(optimised.commands) <= len(program.commands)
    assert_same_result(program, optimised)
    assert optimise(optimised) == optimised
