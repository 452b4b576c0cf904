# SPDX-License-Identifier: Apache-2.0
"""Programs for tests of passes: built command by command, read back as text, run both ways."""

from typing import Any

import torch
from torch import Tensor

from rbln_host.compiler.graph import Captured, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import resolve
from rbln_host.compiler.serial import dumps, loads
from rbln_host.runtime.interpreter import Interpreter


class Build:
    """``b = Build(x=(2, 4)); b("y = relu", "x")``; strings that name values are values.

    Inputs are shapes, or example tensors where the dtype or the content matters.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, **inputs: tuple[int, ...] | Tensor):
        self.dtype = dtype
        self.examples = {
            name: given if isinstance(given, Tensor) else random(*given, dtype=dtype)
            for name, given in inputs.items()
        }
        self.weights: dict[str, Tensor] = {}
        self.commands: list[Command] = []
        self._values = {*self.examples}

    def weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """A weight ``model.<name>`` under the value ``<name>``."""
        self.weights[name] = random(*shape, dtype=dtype or self.dtype)
        self._values.add(name)

    def __call__(self, call: str, *args: object, **kwargs: object) -> None:
        """Add a command: ``"a, b = chunk"``, ``"y = mul.Tensor"``, ``"rbln::write_kv"``."""
        names, _, operator = call.rpartition(" = ")
        operator, _, overload = operator.partition(".")
        operator = operator if "::" in operator else f"aten::{operator}"
        outputs = tuple(None if n == "_" else n for n in names.split(", ") if n)
        schema = resolve(operator, overload or "default")._schema
        results = [str(result.type) for result in schema.returns]
        self.commands.append(
            Command(
                operator,
                overload or "default",
                self._placed(args),
                {key: self._placed(value) for key, value in kwargs.items()},
                outputs,
                len(results) > 1 or results == ["List[Tensor]"],
            )
        )
        self._values.update(filter(None, outputs))

    def captured(self, *outputs: str) -> Captured:
        inputs = {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.examples.items()}
        weights = {name: f"model.{name}" for name in self.weights}
        graph = Graph("p", inputs, weights, tuple(self.commands), outputs)
        return Captured(graph, {weights[name]: t for name, t in self.weights.items()})

    def _placed(self, argument: Any) -> Any:
        if isinstance(argument, str) and argument in self._values:
            return Ref(argument)
        if isinstance(argument, list | tuple):
            return tuple(self._placed(item) for item in argument)
        return argument

    def run(self, captured: Captured) -> list[Tensor]:
        """Outputs, and then the inputs as the program leaves them. The file is what is run."""
        inputs = {name: tensor.clone() for name, tensor in self.examples.items()}
        graph = loads(dumps(captured.graph))
        outputs = Interpreter(graph, captured.weights).run(inputs)
        return [*[t.clone() for t in outputs], *inputs.values()]

    def assert_same(self, before: Captured, after: Captured, tolerance: float = 0.0) -> None:
        """Both give the same, up to ``tolerance`` relative to the largest element."""
        for expected, got in zip(self.run(before), self.run(after), strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            limit = tolerance * float(expected.float().abs().max()) if expected.numel() else 0
            torch.testing.assert_close(got, expected, rtol=0, atol=limit)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for every call of one shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def text(captured: Captured) -> list[str]:
    """The program's commands, a line each: ``y = add.Tensor(x, 1)``."""
    return [line(command) for command in captured.graph.commands]


def operators(captured: Captured) -> list[str]:
    """The program's operators in order, without those that only change the view."""
    views = {"view", "transpose.int", "select.int", "unsqueeze", "split_with_sizes", "reshape"}
    views |= {"slice.Tensor", "chunk"}
    named = [
        line(command).rpartition(" = ")[2].partition("(")[0] for command in captured.graph.commands
    ]
    return [name for name in named if name not in views]


def line(command: Command) -> str:
    outputs = ", ".join(name or "_" for name in command.outputs)
    overload = "" if command.overload == "default" else f".{command.overload}"
    arguments = [_shown(a) for a in command.args]
    arguments += [f"{key}={_shown(a)}" for key, a in command.kwargs.items()]
    call = f"{command.operator.removeprefix('aten::')}{overload}({', '.join(arguments)})"
    return f"{outputs} = {call}" if outputs else call


def _shown(argument: Any) -> str:
    if isinstance(argument, Ref):
        return argument.name
    if isinstance(argument, tuple):
        return f"[{', '.join(map(_shown, argument))}]"
    return str(argument).removeprefix("torch.")
