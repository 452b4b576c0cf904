# SPDX-License-Identifier: Apache-2.0
"""Random programs, for properties that hold whatever a program does."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.shapes import infer, specs

ROWS, WIDTH = 4, 6
Draw = Callable[[st.SearchStrategy[int]], int]


def _call(operator: str, overload: str, *args: object, out: str) -> Command:
    placed = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    return Command(f"aten::{operator}", overload, placed, {}, (out,))


def _step(draw: Draw, values: list[str], out: str) -> list[Command]:
    """A few commands that make ``out``, of shape ``[ROWS, WIDTH]``, from earlier values."""
    one, other = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
    half = WIDTH // 2
    kinds: list[Callable[[], list[Command]]] = [
        lambda: [_call("add", "Tensor", one, other, out=out)],
        lambda: [_call("tanh", "default", one, out=out)],
        lambda: [_call("clone", "default", one, out=out)],
        lambda: [
            _call("t", "default", one, out=f"{out}_t"),
            _call("reshape", "default", f"{out}_t", (ROWS, WIDTH), out=out),
        ],
        lambda: [
            _call("slice", "Tensor", one, 1, 0, half, out=f"{out}_a"),
            _call("slice", "Tensor", other, 1, half, WIDTH, out=f"{out}_b"),
            Command("aten::cat", "default", ((Ref(f"{out}_b"), Ref(f"{out}_a")), 1), {}, (out,)),
        ],
        lambda: [
            Command("aten::split", "Tensor", (Ref(one), half, 1), {}, (f"{out}_a", None), True),
            _call("relu", "default", f"{out}_a", out=f"{out}_r"),
            _call("repeat", "default", f"{out}_r", (1, 2), out=out),
        ],
        lambda: [
            _call("clone", "default", one, out=f"{out}_c"),
            _call("select", "int", f"{out}_c", 0, 1, out=f"{out}_row"),
            _call("add_", "Scalar", f"{out}_row", 2.0, out=f"{out}_w"),
            _call("alias", "default", f"{out}_c", out=out),
        ],
        lambda: [
            _call("full", "default", (ROWS, WIDTH), 0.5, out=f"{out}_f"),
            _call("mul", "Tensor", f"{out}_f", one, out=out),
        ],
        lambda: [
            _call("exp", "default", "p_w", out=f"{out}_e"),
            _call("mul", "Tensor", f"{out}_e", one, out=out),
        ],
    ]
    return kinds[draw(st.integers(0, len(kinds) - 1))]()


@st.composite
def graphs(draw: Draw) -> Graph:
    """A program of inputs ``x`` and ``y`` and a weight ``w``, some values of it returned."""
    values, commands = ["x", "y", "p_w"], []
    for number in range(draw(st.integers(1, 12))):
        name = f"v{number}"
        commands += _step(draw, values, name)
        values.append(name)
    count = draw(st.integers(1, 3))
    outputs = tuple(values[draw(st.integers(0, len(values) - 1))] for _ in range(count))
    spec = TensorSpec((ROWS, WIDTH), torch.float32)
    return Graph("random", {"x": spec, "y": spec}, {"p_w": "w"}, tuple(commands), outputs)


def tensors(graph: Graph) -> dict[str, Tensor]:
    """Every value of such a program as a meta tensor."""
    return infer(graph, specs({"w": torch.empty(ROWS, WIDTH)}))
