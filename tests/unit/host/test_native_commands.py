# SPDX-License-Identifier: Apache-2.0
"""Which commands kernels take, as what, and why they do not take others."""

import pytest
import torch

from rbln_host.compiler.graph import Captured, Command, Graph, TensorSpec
from rbln_host.compiler.plan import plan_memory
from rbln_host.compiler.shapes import infer
from rbln_host.runtime.native import start_runtime
from rbln_host.runtime.native.commands.call import NativeCommand, Site, Unclaimed
from rbln_host.runtime.native.commands.claim import claim
from rbln_host.runtime.native.segments import Fallback, Native, Step, joined
from rbln_host.runtime.options import ExecutorOptions
from rbln_host.runtime.weight_store import WeightStore
from tests.unit.host.native_layer import fused

FLOAT, INT = torch.float32, torch.int64
INPUTS = {
    "%x": TensorSpec((4, 6, 8), FLOAT),
    "%rows": TensorSpec((6, 8), FLOAT),
    "%flag": TensorSpec((6, 8), torch.bool),
    "%ids": TensorSpec((2, 3), INT),
    "%one": TensorSpec((), FLOAT),
    "%cube": TensorSpec((3, 4, 5), FLOAT),
}
WEIGHTS = {"w": torch.ones(5, 8), "table": torch.ones(9, 8), "cube": torch.ones(3, 4, 5)}


def site_of(*commands: Command) -> tuple[Graph, Site]:
    """A program of these commands, its weights packed where some linear reads them."""
    outputs = tuple(name for name in commands[-1].outputs if name) or ("%x",)
    graph = Graph("p", INPUTS, {f"%{n}_": n for n in WEIGHTS}, commands, outputs)
    weights = WeightStore()
    weights.add([Captured(graph, WEIGHTS)])
    plan = plan_memory(graph, infer(graph, weights.specs))
    return graph, Site(plan, graph.weights, weights.packed_specs)


def claimed(*commands: Command) -> tuple[NativeCommand, ...]:
    """What the last command becomes."""
    graph, site = site_of(*commands)
    return claim(graph.commands[-1], site)


def step(*commands: Command) -> Step:
    """What comes of the last command when the kernels have looked at it."""
    graph, site = site_of(*commands)
    compiler = start_runtime(ExecutorOptions(cpus=(0,))).compiler
    return list(compiler.steps(graph, site))[-1]


def shapes(command: NativeCommand) -> list[tuple[int, ...] | None]:
    return [None if o is None else o.shape for o in command.operands]


class TestLinear:
    def test_leading_axes_are_rows(self) -> None:
        linear = fused("rbln::linear", "%x", "%w_", None, None, "silu", out=("%o",))
        (found,) = claimed(linear)
        assert (found.op, found.text) == ("linear", "silu")
        assert shapes(found) == [(24, 8), (1, 8, 16), None, None, (24, 5)]

    def test_a_computed_weight_is_refused(self) -> None:
        half = fused("aten::slice.Tensor", "%w_", 0, 0, 3, out=("%h",))
        linear = fused("rbln::linear", "%rows", "%h", None, None, "none", out=("%o",))
        with pytest.raises(Unclaimed, match="not a packed one"):
            claimed(half, linear)

    def test_the_kernels_reason_is_kept(self) -> None:
        sliced = fused("aten::slice.Tensor", "%x", 2, 0, 8, 2, out=("%s",))
        norm = fused("rbln::rms_norm", "%s", None, 1e-5, 0, out=("%o",))
        found = step(sliced, norm)
        assert isinstance(found, Fallback)
        assert found.reason == "rms_norm: input: elements of a row must follow each other"


class TestLookup:
    def test_a_plain_table(self) -> None:
        (found,) = claimed(fused("aten::embedding", "%table_", "%ids", out=("%o",)))
        assert shapes(found) == [(9, 8), (6,), (6, 8)]
        assert found.numbers == {"packed": 0, "rows": 9, "width": 8}

    def test_a_tied_table_is_read_packed(self) -> None:
        """Whichever of the two comes first in the program."""
        linear = fused("rbln::linear", "%rows", "%w_", None, None, "none", out=("%l",))
        (found,) = claimed(linear, fused("aten::embedding", "%w_", "%ids", out=("%o",)))
        assert shapes(found) == [(1, 8, 16), (6,), (6, 8)]
        assert found.numbers == {"packed": 1, "rows": 5, "width": 8}

    @pytest.mark.parametrize(
        ("command", "reason"),
        [
            (fused("aten::index_select", "%rows", 1, "%i", out=("%o",)), "another axis"),
            (fused("aten::index_select", "%cube", 0, "%i", out=("%o",)), "not a matrix"),
        ],
    )
    def test_refused(self, command: Command, reason: str) -> None:
        ids = fused("aten::select.int", "%ids", 0, 0, out=("%i",))
        with pytest.raises(Unclaimed, match=reason):
            claimed(ids, command)

    def test_along_the_first_axis(self) -> None:
        ids = fused("aten::select.int", "%ids", 0, 0, out=("%i",))
        (found,) = claimed(ids, fused("aten::index_select", "%rows", -2, "%i", out=("%o",)))
        assert shapes(found) == [(6, 8), (3,), (3, 8)]


class TestCopies:
    def test_as_few_axes_as_can_be(self) -> None:
        (found,) = claimed(fused("aten::clone", "%x", out=("%o",)))
        assert shapes(found) == [(192,), (192,)]

    def test_reshape(self) -> None:
        turned = fused("aten::transpose.int", "%x", 0, 1, out=("%t",))
        (found,) = claimed(turned, fused("aten::reshape", "%t", (24, 8), out=("%o",)))
        source, target = found.operands
        assert source is not None
        assert (source.shape, source.strides) == ((6, 4, 8), (8, 48, 1))
        assert target is not None
        assert target.strides == (32, 8, 1)

    def test_cat_is_one_copy_for_each_part(self) -> None:
        part = fused("aten::slice.Tensor", "%rows", 1, 2, 5, out=("%p",))
        none = fused("aten::slice.Tensor", "%rows", 1, 2, 2, out=("%n",))
        cat = fused("aten::cat", ("%rows", "%n", "%p"), -1, out=("%o",))
        found = claimed(part, none, cat)
        assert [shapes(c) for c in found] == [[(6, 8)] * 2, [(6, 3)] * 2]
        assert [c.operands[1].offset for c in found if c.operands[1]] == [0, 32]

    def test_write_spreads_its_source(self) -> None:
        (found,) = claimed(
            fused("aten::empty_like", "%rows", out=("%e",)),
            fused("aten::copy_", "%e", "%one", out=("%o",)),
        )
        assert found.operands[0] is not None
        assert found.operands[0].strides == (0,)

    def test_dtypes_no_kernel_has(self) -> None:
        found = step(fused("aten::to.dtype", "%flag", FLOAT, out=("%o",)))
        assert isinstance(found, Fallback)
        assert found.reason == "unknown dtype 'bool'"

    def test_many_axes(self) -> None:
        spread = fused("aten::view", "%x", (2, 2, 2, 3, 2, 2, 2), out=("%v",))
        turned = fused("aten::permute", "%v", (6, 5, 4, 3, 2, 1, 0), out=("%t",))
        with pytest.raises(Unclaimed, match="too many axes"):
            claimed(spread, turned, fused("aten::clone", "%t", out=("%o",)))

    def test_nothing_to_do(self) -> None:
        none = fused("aten::slice.Tensor", "%rows", 0, 2, 2, out=("%n",))
        add = fused("rbln::elementwise", ("%n",), "i0 c1.0 add", out=("%o",))
        assert claimed(none, add) == ()
        assert step(none, add) == Native(add, ())


class TestOthers:
    def test_elementwise_operands_are_expanded(self) -> None:
        add = fused("rbln::elementwise", ("%x", "%rows", "%one"), "i0 i1 add i2 mul", out=("%o",))
        (found,) = claimed(add)
        assert shapes(found) == [(4, 48)] * 4
        assert [o.strides for o in found.operands if o] == [(48, 1), (0, 1), (0, 0), (48, 1)]

    def test_argmax_of_the_last_axis(self) -> None:
        (found,) = claimed(fused("aten::argmax", "%x", 2, out=("%o",)))
        assert shapes(found) == [(24, 8), (24,)]
        for dim in (0, 1, None):
            with pytest.raises(Unclaimed, match="last axis"):
                claimed(fused("aten::argmax", "%x", dim, out=("%o",)))

    def test_an_operator_without_a_kernel(self) -> None:
        with pytest.raises(Unclaimed, match="no kernel does this"):
            claimed(fused("aten::cumsum", "%x", 0, out=("%o",)))

    def test_stretches(self) -> None:
        native = Native(fused("aten::clone", "%x", out=("%o",)), ())
        other = Fallback(native.command, "why")
        assert list(joined([])) == []
        assert list(joined([native, native, other, other, native])) == [
            [native, native],
            other,
            other,
            [native],
        ]
