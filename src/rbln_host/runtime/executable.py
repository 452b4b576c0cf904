# SPDX-License-Identifier: Apache-2.0
"""An executable: loaded programs bound to their weights and to the KV pool."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor

from rbln_host.compiler.artifact import Artifact
from rbln_host.compiler.capture import Captured
from rbln_host.compiler.graph import Graph
from rbln_host.compiler.lowering import lowered
from rbln_host.errors import MissingProgramError
from rbln_host.runtime.inputs import ALL_TOKENS
from rbln_host.runtime.interpreter import Interpreter
from rbln_host.runtime.kv_copy import (
    KVCopier,
    KVCopyOrder,
    KVPool,
    NativeKVCopier,
    TorchKVCopier,
)
from rbln_host.runtime.native import NativeProgram, NativeRuntime, start_runtime
from rbln_host.runtime.options import Executor, ExecutorOptions
from rbln_host.runtime.weight_store import WeightStore


class LoadedProgram(Protocol):
    """A program with its weights bound."""

    graph: Graph

    def run(
        self, inputs: Mapping[str, Tensor], bound: Mapping[str, Tensor], tokens: int
    ) -> tuple[Tensor, ...]:
        """Run once; ``inputs`` go before those that are ``bound``.

        Raises ValueError for a missing input or one of another shape or dtype.
        """


class Executable:
    """Programs that can be run by name.

    Inputs that stay the same between runs (the KV pool) are bound once; ``run`` takes the rest.
    The native executor returns the same tensors in every run of a program: they are valid until
    its next run.
    """

    def __init__(self, options: ExecutorOptions | None = None) -> None:
        self._options = options or ExecutorOptions()
        self._sources: dict[str, Callable[[], Graph]] = {}
        self._programs: dict[str, LoadedProgram] = {}
        self._weights = WeightStore()
        self._bound: Mapping[str, Tensor] = {}
        self._kv_copier: KVCopier | None = None

    def add_artifact(self, artifact: Artifact) -> None:
        """Offer every program of an artifact; each is read when it is first loaded."""
        for name in artifact.program_names:
            self._sources[name] = lambda name=name: artifact.program(name)  # type: ignore[misc]
        self._weights.update(artifact.weights())

    def add(self, *captured: Captured) -> None:
        """Offer programs that were just compiled and are in memory."""
        items = lowered(captured)
        for item in items:
            self._sources[item.graph.name] = lambda graph=item.graph: graph  # type: ignore[misc]
        self._weights.add(items)

    @property
    def program_names(self) -> frozenset[str]:
        return frozenset(self._sources)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored (packed), once however many programs read them."""
        return self._weights.nbytes

    @cached_property
    def runtime(self) -> NativeRuntime:
        """Threads and arena of the native executor, from the first use on.

        Raises ExecutorError when this machine cannot run it as asked.
        """
        return start_runtime(self._options)

    @property
    def description(self) -> str:
        """Executor and instruction set, for logs. Raises ExecutorError as ``runtime`` does."""
        if self._options.executor is Executor.REFERENCE:
            return "reference executor (torch's CPU operators)"
        return f"native executor ({self.runtime.compiler.isa})"

    def load(self, name: str) -> LoadedProgram:
        """Read a program and bind its weights; MissingProgramError when it is not here,
        ArtifactError when it cannot run."""
        program = self._programs.get(name)
        if program is None:
            if name not in self._sources:
                raise MissingProgramError(f"program {name} has not been compiled")
            program = self._load(self._sources[name]())
            self._programs[name] = program
        return program

    def _load(self, graph: Graph) -> LoadedProgram:
        if self._options.executor is Executor.NATIVE:
            return NativeProgram(graph, self._weights, self.runtime)
        names = set(graph.weights.values())
        weights = {name: self._weights.plain(name) for name in names if name in self._weights}
        return Interpreter(graph, weights)

    def bind(self, inputs: Mapping[str, Tensor]) -> None:
        """Use these tensors for inputs of these names in every later run."""
        self._bound = {**self._bound, **inputs}

    def bind_kv(self, layers: Mapping[str, Tensor]) -> None:
        """Bind the KV pool, a tensor ``[num_blocks, num_kv_heads, block_size, width]`` per layer.

        Raises ValueError for layers that are no pool.
        """
        self._kv_copier = self._new_kv_copier(KVPool.of(list(layers.values())))
        self.bind(layers)

    def copy_kv(self, copies: Sequence[KVCopyOrder]) -> None:
        """Copy the first ``tokens`` positions of blocks, ``(source, target, tokens)``, in order.

        Of every head of every layer bound as the KV pool. Raises, before anything is copied,
        IndexError for a block that does not exist, ValueError for tokens outside 1 to
        ``block_size`` or when no pool is bound.
        """
        if self._kv_copier is None:
            raise ValueError("no KV pool is bound: bind_kv comes first")
        self._kv_copier.copy(copies)

    def _new_kv_copier(self, pool: KVPool) -> KVCopier:
        if self._options.executor is Executor.NATIVE:
            return NativeKVCopier(pool, self.runtime)
        return TorchKVCopier(pool)

    def run(
        self, name: str, inputs: Mapping[str, Tensor], tokens: int = ALL_TOKENS
    ) -> tuple[Tensor, ...]:
        """Run a program; outputs in the order the captured module returned them.

        Only the first ``tokens`` rows of outputs are wanted: those of padding may hold anything.
        """
        return self.load(name).run(inputs, self._bound, tokens)
