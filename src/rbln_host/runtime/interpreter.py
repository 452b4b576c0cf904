# SPDX-License-Identifier: Apache-2.0
"""The reference executor: runs a program command by command on torch's CPU operators."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.operators import resolve
from rbln_host.errors import ArtifactError
from rbln_host.runtime.arguments import fetched, placed
from rbln_host.runtime.inputs import ALL_TOKENS, NOTHING, checked_inputs

Register = int
"""Index of a value in the executor's value table."""


class Interpreter:
    """A loaded program with its weights bound. Raises ArtifactError when one is not in ``weights``.

    Values live in numbered registers and are dropped after their last use, so peak memory is
    that of the values alive at once.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Tensor]) -> None:
        self.graph = graph
        names = [*graph.inputs, *graph.weights]
        self._registers = {name: index for index, name in enumerate(names)}
        self._weights = [_weight(graph, weights, name) for name in graph.weights.values()]
        self._steps = self._plan(graph)
        self._outputs = [self._registers[name] for name in graph.outputs]
        self._count = len(self._registers)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        bound: Mapping[str, Tensor] = NOTHING,
        tokens: int = ALL_TOKENS,  # every row is computed
    ) -> tuple[Tensor, ...]:
        """Run once; ``inputs`` go before those that are ``bound``.

        Raises ValueError for a missing input or one of another shape or dtype.
        """
        values: list[Any] = [*checked_inputs(self.graph, {**bound, **inputs})]
        values += self._weights
        values += [None] * (self._count - len(values))
        with torch.no_grad():
            for step in self._steps:
                step(values)
        return tuple(values[register] for register in self._outputs)

    def _plan(self, graph: Graph) -> list[Callable[[list[Any]], None]]:
        last_use = {name: i for i, c in enumerate(graph.commands) for name in c.inputs()}
        last_use |= dict.fromkeys((*graph.outputs, *graph.inputs, *graph.weights), -1)
        steps = []
        for index, command in enumerate(graph.commands):
            outputs = tuple(filter(None, command.outputs))
            for name in outputs:
                self._registers[name] = len(self._registers)
            touched = {*command.inputs(), *outputs}
            dying = {name for name in touched if last_use.get(name, index) == index}
            steps.append(self._step(command, sorted(self._registers[n] for n in dying)))
        return steps

    def _step(self, command: Command, dying: list[Register]) -> Callable[[list[Any]], None]:
        function = resolve(command.operator, command.overload)
        place_of = self._registers.__getitem__
        args = [placed(a, place_of) for a in command.args]
        kwargs = {key: placed(a, place_of) for key, a in command.kwargs.items()}
        targets = [(i, self._registers[n]) for i, n in enumerate(command.outputs) if n]
        single = targets[0][1] if targets and not command.returns_tuple else None

        def step(values: list[Any]) -> None:
            result = function(
                *[fetched(a, values) for a in args],
                **{key: fetched(a, values) for key, a in kwargs.items()},
            )
            if single is not None:
                values[single] = result
            else:
                for index, register in targets:
                    values[register] = result[index]
            for register in dying:
                values[register] = None

        return step


def _weight(graph: Graph, weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise ArtifactError(f"program {graph.name} reads the weight {name!r}, which is not there")
    return weights[name]
