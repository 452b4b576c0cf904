# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what is alive together lies apart, and little memory is taken."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.plan import ALIGNMENT, Kind, Plan, Storage, View, Work, place, plan_memory
from rbln_host.compiler.shapes import infer, same_memory, specs
from tests.unit.host.programs import call
from tests.unit.host.random_graphs import graphs, tensors

SPEC = TensorSpec((4, 64), torch.float32)
BYTES = 4 * 64 * 4
WEIGHT = torch.empty(4, 64)


def plan(*commands: Command, outputs: tuple[str, ...]) -> Plan:
    """The plan of a program of an input ``x`` and a weight ``p_w``."""
    graph = Graph("p", {"x": SPEC}, {"p_w": "w"}, commands, outputs)
    return plan_memory(graph, infer(graph, specs({"w": WEIGHT})))


def storage(name: str, lines: int, first: int, last: int, offset: int = 0) -> Storage:
    return Storage(Kind.ARENA, name, lines * ALIGNMENT, first, last, offset * ALIGNMENT)


def overlap(one: Storage, other: Storage) -> bool:
    return max(one.offset, other.offset) < min(one.end, other.end)


def needed_at(graph: Graph, values: dict[str, Tensor]) -> dict[str, set[int]]:
    """The commands at which each value's memory is needed, found without the planner."""
    needed: dict[str, set[int]] = {}
    for name, tensor in values.items():
        touching = [
            index
            for index, command in enumerate(graph.commands)
            for other in (*command.inputs(), *filter(None, command.outputs))
            if same_memory(tensor, values[other])
        ]
        needed[name] = set(range(min(touching), max(touching) + 1)) if touching else set()
    return needed


class TestProperties:
    @given(graph=graphs())
    @settings(max_examples=60)
    def test_values_that_are_alive_together_share_no_byte(self, graph: Graph) -> None:
        values = tensors(graph)
        found, needed = plan_memory(graph, values), needed_at(graph, values)
        own = [name for name in values if found.storage(name).kind is Kind.ARENA]
        for one, other in itertools.combinations(own, 2):
            if not same_memory(values[one], values[other]) and needed[one] & needed[other]:
                assert not overlap(found.storage(one), found.storage(other)), (one, other)

    @given(graph=graphs())
    @settings(max_examples=60)
    def test_views_are_those_of_the_values(self, graph: Graph) -> None:
        values = tensors(graph)
        found = plan_memory(graph, values)
        for name, tensor in values.items():
            view = found.views[name]
            assert (view.shape, view.strides) == (tuple(tensor.shape), tensor.stride())
            assert (view.dtype, view.offset) == (tensor.dtype, tensor.storage_offset())
            for other in values:
                together = found.views[other].storage == view.storage
                assert together == same_memory(tensor, values[other])

    @given(graph=graphs())
    @settings(max_examples=60)
    def test_the_arena_is_between_the_peak_and_the_sum(self, graph: Graph) -> None:
        found = plan_memory(graph, tensors(graph))
        arena = found.of_kind(Kind.ARENA)
        assert found.arena_bytes <= sum(-(-s.nbytes // ALIGNMENT) * ALIGNMENT for s in arena)
        for index in range(len(graph.commands)):
            alive = sum(s.nbytes for s in arena if s.first <= index <= s.last)
            assert found.arena_bytes >= alive


class TestPlaces:
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=20)
    )
    def test_any_lifetimes(self, rows: list[tuple[int, int, int]]) -> None:
        wanted = [
            storage(str(i), lines, first, first + length)
            for i, (lines, first, length) in enumerate(rows)
        ]
        placed = place(wanted)
        assert sorted(s.name for s in placed) == sorted(s.name for s in wanted)
        for one, other in itertools.combinations(placed, 2):
            alive = max(one.first, other.first) <= min(one.last, other.last)
            assert not (alive and overlap(one, other))

    def test_the_tightest_gap_is_taken(self) -> None:
        """Sizes fall, so what stays (odd) and what goes (even) lie in this order."""
        early = [storage(str(n), n, 0, 9 if n % 2 else 3) for n in (9, 8, 7, 6, 5)]
        offsets = {s.name: s.offset // ALIGNMENT for s in place([*early, storage("4", 4, 5, 9)])}
        assert offsets == {"9": 0, "8": 9, "7": 17, "6": 24, "5": 30, "4": 24}

    def test_a_chain_needs_two_places(self) -> None:
        names = ["x", *(f"v{i}" for i in range(9))]
        chain = [call("add", a, 1, out=b) for a, b in itertools.pairwise(names)]
        found = plan(*chain, outputs=("v8",))
        assert found.arena_bytes == 2 * BYTES
        assert {found.storage(f"v{i}").offset for i in range(8)} == {0, BYTES}

    def test_offsets_are_aligned(self) -> None:
        odd = call("slice", "x", 1, 0, 3, out="s")
        commands = [
            odd,
            *(call("clone", "s", out=f"c{i}", overload="default") for i in range(3)),
            call("add", "c0", "c1", out="a"),
            call("add", "a", "c2", out="b"),
        ]
        found = plan(*commands, outputs=("b",))
        assert {s.offset % ALIGNMENT for s in found.storages} == {0}


class TestKinds:
    def test_of_values(self) -> None:
        found = plan(
            call("add", "x", "p_w", out="a"),
            call("exp", "p_w", out="c", overload="default"),
            call("mul", "a", "c", out="b"),
            call("t", "b", out="o", overload="default"),
            outputs=("o", "x"),
        )
        kinds = {name: found.storage(name).kind for name in ("x", "p_w", "a", "b", "c", "o")}
        assert kinds == {
            "x": Kind.INPUT,
            "p_w": Kind.WEIGHT,
            "a": Kind.ARENA,
            "b": Kind.OUTPUT,
            "c": Kind.CONSTANT,
            "o": Kind.OUTPUT,
        }
        assert found.storage("p_w").name == "w"
        assert found.work == (Work.EVERY_RUN, Work.ONCE, Work.EVERY_RUN, Work.NONE)

    def test_an_output_that_is_part_of_an_input(self) -> None:
        found = plan(call("slice", "x", 0, 1, 2, out="o"), outputs=("o",))
        assert found.storage("o").kind is Kind.INPUT
        assert found.views["o"] == View(0, torch.float32, 64, (1, 64), (64, 1))
        assert found.arena_bytes == 0

    def test_what_is_written_to_is_no_constant(self) -> None:
        found = plan(
            call("exp", "p_w", out="c", overload="default"),
            call("add_", "c", "x", out="a"),
            call("mul", "a", "x", out="b"),
            outputs=("b",),
        )
        assert found.storage("c").kind is Kind.ARENA
        assert found.work == (Work.EVERY_RUN,) * 3

    def test_what_is_large_is_no_constant(self) -> None:
        found = plan(
            call("full", (1 << 20, 2), 1.0, out="large", overload="default"),
            call("full", (1, 1), 1.0, out="small", overload="default"),
            call("slice", "large", 0, 0, 1, out="part"),
            call("mul", "part", "small", out="b"),
            outputs=("b",),
        )
        assert found.work == (Work.EVERY_RUN, Work.ONCE, Work.NONE, Work.EVERY_RUN)

    def test_random_numbers_are_no_constant(self) -> None:
        found = plan(
            call("rand", (4, 64), out="r", overload="default"),
            call("mul", "x", "r", out="b"),
            outputs=("b",),
        )
        assert found.work == (Work.EVERY_RUN, Work.EVERY_RUN)

    def test_uninitialised_memory_costs_nothing(self) -> None:
        found = plan(
            call("empty_like", "x", out="e", overload="default"),
            call("copy_", "e", "x", out="c", overload="default"),
            call("add", "c", 1, out="b"),
            outputs=("b",),
        )
        assert found.work == (Work.NONE, Work.EVERY_RUN, Work.EVERY_RUN)
        assert found.views["e"].storage == found.views["c"].storage

    def test_results_without_a_reader(self) -> None:
        split = Command("aten::split", "Tensor", (Ref("x"), 2), {}, (None, "s"), True)
        assert plan(split, outputs=("s",)).work == (Work.NONE,)


class TestChecks:
    def test_storages_that_overlap(self) -> None:
        def of(*storages: Storage) -> Plan:
            return Plan(storages, {}, (), 8 * ALIGNMENT)

        of(storage("a", 2, 0, 1), storage("b", 2, 2, 3))
        of(storage("a", 2, 0, 1), storage("b", 2, 1, 3, offset=2))
        of(storage("a", 2, 0, 5), storage("z", 0, 0, 5, offset=1))
        with pytest.raises(ValueError, match="overlap"):
            of(storage("a", 2, 0, 1), storage("b", 2, 1, 3, offset=1))
        with pytest.raises(ValueError, match="overlap"):
            of(storage("a", 5, 0, 9), storage("b", 1, 0, 3, 6), storage("c", 1, 4, 9, 4))
        with pytest.raises(ValueError, match="does not fit"):
            of(storage("a", 9, 0, 1))

    def test_storages(self) -> None:
        with pytest.raises(ValueError, match="not aligned"):
            Storage(Kind.ARENA, "a", 4, 0, 1, offset=4)
        with pytest.raises(ValueError, match="bytes"):
            Storage(Kind.ARENA, "a", -1, 0, 1)
        with pytest.raises(ValueError, match="bytes"):
            Storage(Kind.ARENA, "a", 4, 2, 1)
