# SPDX-License-Identifier: Apache-2.0
"""An executable: loaded programs bound to their weights and to the KV pool."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rbln_host.compiler.artifact import Artifact
from rbln_host.compiler.capture import Captured
from rbln_host.compiler.graph import Graph
from rbln_host.errors import MissingProgramError
from rbln_host.runtime.interpreter import Interpreter


class Executable:
    """Programs that can be run by name.

    Inputs that stay the same between runs (the KV pool) are bound once; ``run`` takes the rest.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Graph]] = {}
        self._programs: dict[str, Interpreter] = {}
        self._weights: dict[str, Tensor] = {}
        self._bound: dict[str, Tensor] = {}

    def add_artifact(self, artifact: Artifact) -> None:
        """Offer every program of an artifact; each is read when it is first loaded."""
        for name in artifact.program_names:
            self._sources[name] = lambda name=name: artifact.program(name)  # type: ignore[misc]
        self._weights.update(artifact.weights())

    def add(self, captured: Captured) -> None:
        """Offer a program that was just compiled and is in memory."""
        self._sources[captured.graph.name] = lambda: captured.graph
        for name, tensor in captured.weights.items():
            self._weights.setdefault(name, tensor)

    @property
    def program_names(self) -> frozenset[str]:
        return frozenset(self._sources)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, counted once however many programs read them."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def load(self, name: str) -> Interpreter:
        """Read a program and bind its weights; MissingProgramError when it is not here."""
        program = self._programs.get(name)
        if program is None:
            if name not in self._sources:
                raise MissingProgramError(f"program {name} has not been compiled")
            program = Interpreter(self._sources[name](), self._weights)
            self._programs[name] = program
        return program

    def bind(self, inputs: Mapping[str, Tensor]) -> None:
        """Use these tensors for inputs of these names in every later run."""
        self._bound.update(inputs)

    def run(self, name: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a program; outputs in the order the captured module returned them."""
        return self.load(name).run({**self._bound, **inputs})
