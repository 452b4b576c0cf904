# SPDX-License-Identifier: Apache-2.0
"""Shape inference: equal to what running gives, and refusing what cannot run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_host.compiler import shapes
from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.shapes import FREE_AXIS, infer, same_memory, specs
from rbln_host.errors import ArtifactError
from rbln_host.runtime.interpreter import Interpreter
from tests.unit.host.programs import call

SPEC = TensorSpec((4, 6), torch.float32)


def graph(*commands: Command, outputs: tuple[str, ...] = ("x",)) -> Graph:
    inputs = {"x": SPEC, "y": SPEC, "ids": TensorSpec((3,), torch.int64)}
    return Graph("p", inputs, {"w": "weight", "v": "weight"}, commands, outputs)


def command(
    operator: str,
    *args: Any,
    out: tuple[str | None, ...],
    overload: str = "default",
    **kwargs: Any,
) -> Command:
    """A command in full; a single output counts as no tuple."""
    schema_tuple = len(out) > 1
    return Command(operator, overload, args, kwargs, out, schema_tuple)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


X, Y, IDS, W = Ref("x"), Ref("y"), Ref("ids"), Ref("w")
CASES = [
    command("aten::transpose", X, 0, 1, out=("a",), overload="int"),
    command("aten::slice", X, 1, 2, 5, out=("a",), overload="Tensor"),
    command("aten::split", X, 4, 1, out=("a", None), overload="Tensor"),
    command("aten::chunk", X, 2, -1, out=("b", "a")),
    command("aten::reshape", X, (2, -1), out=("a",)),
    command("aten::mul", X, 2, out=("a",), overload="Tensor"),
    command("aten::to", X, torch.bfloat16, out=("a",), overload="dtype"),
    command("aten::expand", X, (2, 4, 6), out=("a",)),
    command("aten::cat", (X, Y), -1, out=("a",)),
    command("aten::linear", X, W, out=("a",)),
    command("aten::index_select", W, 0, IDS, out=("a",)),
    command("aten::embedding", W, IDS, out=("a",)),
    command("aten::copy_", X, Y, out=("a",)),
    command("aten::arange", 5, out=("a",)),
    command("aten::zeros", (2, 3), out=("a",), device=torch.device("cpu")),
    command("aten::view", X, torch.int32, out=("a",), overload="dtype"),
    command("aten::broadcast_tensors", (X, W), out=("b", "a")),
    command("rbln::rms_norm", X, None, 1e-6, 0, out=("a",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operator)
def test_equals_what_running_gives(case: Command) -> None:
    twice = [case, replace(case, outputs=renamed(case.outputs))]
    program = graph(*twice, outputs=("a", "a2", "x"))
    weights = {"weight": torch.randn(4, 6)}
    values = infer(program, specs(weights))
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6), "ids": torch.tensor([0, 3, 1])}
    first, second, x = Interpreter(program, weights).run(inputs)
    assert layout(values["a"]) == layout(first)
    assert layout(values["a2"]) == layout(second)
    for name, real in (("a", first), ("a2", second)):
        shares = real.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert same_memory(values[name], values["x"]) == shares
    assert same_memory(values["a"], values["a2"]) == (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )


def renamed(outputs: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return tuple(name and f"{name}2" for name in outputs)


def test_the_same_view_of_two_values_is_told_apart() -> None:
    """The second is worked out from the first; it must still be a view of its own source."""
    program = graph(
        command("aten::slice", X, 0, 1, 3, out=("a",), overload="Tensor"),
        command("aten::slice", Y, 0, 1, 3, out=("b",), overload="Tensor"),
        command("aten::slice", Ref("b"), 1, 1, 3, out=("c",), overload="Tensor"),
        command("aten::slice", Ref("a"), 1, 1, 3, out=("d",), overload="Tensor"),
    )
    values = infer(program, {"weight": SPEC})
    assert same_memory(values["a"], values["x"])
    assert not same_memory(values["a"], values["y"])
    assert same_memory(values["c"], values["y"])
    assert layout(values["d"]) == layout(torch.empty(4, 6)[1:3, 1:3])


def test_a_view_of_one_of_two_inputs_that_share_memory() -> None:
    views = command("aten::broadcast_tensors", (X, X), out=("a", "b"))
    other = command("aten::broadcast_tensors", (X, Y), out=("c", "d"))
    values = infer(graph(views, other), {"weight": SPEC})
    assert same_memory(values["d"], values["y"])


def test_two_values_of_one_weight_share_memory() -> None:
    values = infer(graph(), {"weight": SPEC})
    assert same_memory(values["w"], values["v"])
    assert not same_memory(values["w"], values["x"])


def test_a_free_axis_has_a_size() -> None:
    program = Graph("p", {"kv": TensorSpec((-1, 3), torch.float32)}, {}, (), ("kv",))
    assert infer(program, {})["kv"].shape == (FREE_AXIS, 3)


def test_scalars_of_other_types_are_other_commands() -> None:
    program = graph(
        command("aten::mul", IDS, 2, out=("a",), overload="Tensor"),
        command("aten::mul", IDS, 2.0, out=("b",), overload="Tensor"),
    )
    values = infer(program, {"weight": SPEC})
    assert values["a"].dtype == torch.int64
    assert values["b"].dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [
        command("aten::mm", X, Y, out=("a",)),
        command("aten::view", X, (5, 5), out=("a",)),
        command("aten::mul", X, "two", out=("a",), overload="Tensor"),
        command("aten::mul", X, None, out=("a",), overload="Tensor"),
        command("aten::chunk", X, 3, -1, out=("a", "b")),
        command("aten::nonzero", X, out=("a",)),
        command("aten::transpose_", X, 0, 1, out=("a",)),
        command("aten::to_sparse", X, out=("a",)),
        command("aten::_neg_view", X, out=("a",)),
        command("aten::empty", (1 << 40, 1 << 40), out=("a",), overload="memory_format"),
    ],
    ids=lambda bad: bad.operator,
)
def test_a_command_that_cannot_run_is_named(bad: Command) -> None:
    with pytest.raises(ArtifactError, match=bad.operator):
        infer(graph(bad), {"weight": SPEC})


def test_a_missing_weight_is_named() -> None:
    with pytest.raises(ArtifactError, match="weight"):
        infer(graph(), {})


def test_a_shape_beyond_any_memory_is_refused() -> None:
    program = Graph("p", {"x": TensorSpec((1 << 40, 1 << 40), torch.float32)}, {}, (), ("x",))
    with pytest.raises(ArtifactError, match="shape"):
        infer(program, {})


def test_each_kind_of_command_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: a model's layers repeat."""
    chain = [call("atan2", "x", "y", out="v0")]
    chain += [call("atan2", f"v{i}", "y", out=f"v{i + 1}") for i in range(50)]
    program = graph(*[replace(command, overload="default") for command in chain])
    calls = []
    once = shapes._call

    def counted(*args: Any) -> Any:
        calls.append(args)
        return once(*args)

    monkeypatch.setattr(shapes, "_call", counted)
    infer(program, {"weight": SPEC})
    assert len(calls) == 1
