# SPDX-License-Identifier: Apache-2.0
"""Rows of padding are left out where every command works row by row, and nowhere else."""

import torch

from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.plan import plan_memory
from rbln_host.compiler.shapes import infer
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.native import compiler_of
from rbln_host.runtime.native.commands.call import Site
from rbln_host.runtime.native.program import with_named_outputs
from rbln_host.runtime.native.tokens import TokenRows, token_rows
from rbln_host.runtime.options import ExecutorOptions

N = 4


def rbln(name: str, *args: object, out: str = "out") -> Command:
    return Command(f"rbln::{name}", "default", args, {}, (out,))


def graph_of(*commands: Command, width: int = 16) -> Graph:
    spec = TensorSpec((N, width), torch.float32)
    return Graph("p", {"x": spec}, {}, commands, (commands[-1].outputs[0] or "",))


def rows_of(graph: Graph) -> TokenRows | None:
    graph = with_named_outputs(graph)
    plan = plan_memory(graph, infer(graph, {}))
    steps = list(compiler_of(ExecutorOptions()).steps(graph, Site(plan, {}, {})))
    return token_rows(graph, plan, steps)


NORM = rbln("rms_norm", Ref("x"), None, 1e-6, 0)


def test_a_norm_is_row_by_row() -> None:
    rows = rows_of(graph_of(NORM))
    assert rows is not None
    assert rows.count == N
    assert "out" in rows.values


def test_a_mean_over_tokens_forbids_it() -> None:
    mean = Command("aten::mean", "dim", (Ref("x"), (0,), True), {}, ("out",))
    assert rows_of(graph_of(mean)) is None


def test_a_square_transposition_forbids_it() -> None:
    turned = Command("aten::transpose", "int", (Ref("x"), 0, 1), {}, ("t",))
    copied = Command("aten::clone", "default", (Ref("t"),), {}, ("out",))
    assert rows_of(graph_of(turned, copied, width=N)) is None


def aten(name: str, *args: object, out: str, overload: str = "default") -> Command:
    return Command(f"aten::{name}", overload, args, {}, (out,))


def test_tokens_may_stand_behind_a_batch_of_one() -> None:
    batched = aten("unsqueeze", Ref("x"), 0, out="batched")
    norm = rbln("rms_norm", Ref("batched"), None, 1e-6, 0)
    rows = rows_of(graph_of(batched, norm))
    assert rows is not None
    assert {"batched", "out"} <= rows.values


def test_a_view_with_its_heads_first_may_be_turned_back() -> None:
    heads = aten("view", Ref("x"), (N, 2, 8), out="heads")
    turned = aten("transpose", Ref("heads"), 0, 1, out="turned", overload="int")
    back = aten("transpose", Ref("turned"), 0, 1, out="back", overload="int")
    norm = rbln("rms_norm", Ref("back"), None, 1e-6, 0)
    rows = rows_of(graph_of(heads, turned, back, norm))
    assert rows is not None
    assert "turned" not in rows.values
    assert "out" in rows.values


def test_work_on_a_view_with_its_heads_first_forbids_it() -> None:
    heads = aten("view", Ref("x"), (N, 2, 8), out="heads")
    turned = aten("transpose", Ref("heads"), 0, 1, out="turned", overload="int")
    norm = rbln("rms_norm", Ref("turned"), None, 1e-6, 0)
    assert rows_of(graph_of(heads, turned, norm)) is None


def test_one_token_is_not_worth_it() -> None:
    one = Graph("p", {"x": TensorSpec((1, 16), torch.float32)}, {}, (NORM,), ("out",))
    assert rows_of(one) is None


def test_rows_beyond_the_tokens_are_not_computed() -> None:
    executable = Executable(ExecutorOptions())
    executable._sources["p"] = lambda: graph_of(NORM)
    x = torch.randn(N, 16)
    (whole,) = executable.run("p", {"x": x})
    expected = whole.clone()
    whole.fill_(7)
    (part,) = executable.run("p", {"x": x}, 3)
    assert torch.equal(part[:3], expected[:3])
    assert (part[3:] == 7).all()
    (again,) = executable.run("p", {"x": x})
    assert torch.equal(again, expected)
