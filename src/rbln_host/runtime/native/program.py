# SPDX-License-Identifier: Apache-2.0
"""A loaded program on the native executor."""

from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from rbln_host.compiler.graph import Graph, TensorSpec
from rbln_host.compiler.plan import Kind, Work, plan_memory
from rbln_host.compiler.shapes import infer
from rbln_host.compiler.weights import spec_of
from rbln_host.runtime.inputs import ALL_TOKENS, NOTHING, check_input, checked_inputs
from rbln_host.runtime.native.commands.call import Site
from rbln_host.runtime.native.extension import Pool, Program
from rbln_host.runtime.native.fallback import fallback_step
from rbln_host.runtime.native.memory import Arena, TorchViews, new_memory
from rbln_host.runtime.native.operands import Base, arena_of, operand_of
from rbln_host.runtime.native.segments import Compiler, Fallback, joined
from rbln_host.runtime.native.tokens import token_rows
from rbln_host.runtime.weight_store import WeightStore


@dataclass(frozen=True)
class NativeRuntime:
    """What all programs of an executable share."""

    compiler: Compiler
    pool: Pool
    arena: Arena = field(default_factory=Arena, repr=False)


class NativeProgram:
    """A program whose kernels run on the runtime's threads.

    ``run`` returns the same tensors on every run: they are valid until the program's next run.
    It is built for the sizes that its inputs have; another size of a free axis (the KV pool's
    number of blocks) has it built again. Raises ArtifactError for commands that cannot run.
    """

    def __init__(self, graph: Graph, weights: WeightStore, runtime: NativeRuntime) -> None:
        self.graph, self._weights, self._runtime = graph, weights, runtime
        has_free_axes = any(-1 in spec.shape for spec in graph.inputs.values())
        self._machine = None if has_free_axes else self._machine_for(graph.inputs)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        bound: Mapping[str, Tensor] = NOTHING,
        tokens: int = ALL_TOKENS,
    ) -> tuple[Tensor, ...]:
        """Run once. Of outputs the first ``tokens`` rows are wanted.

        ``bound`` has inputs that stay: what is looked at is whether it is the same mapping as in
        the last run. ``inputs`` go before them.

        Raises ValueError for a missing input, one of another shape or dtype or with gaps,
        IndexError for an id, position, slot or block that is out of range.
        """
        if self._machine is None:
            self._machine = self._build({**bound, **inputs})
        try:
            return self._machine.run(inputs, bound, tokens)
        except _OtherSizesError:
            self._machine = self._build({**bound, **inputs})
            return self._machine.run(inputs, bound, tokens)

    def _build(self, inputs: Mapping[str, Tensor]) -> "_Machine":
        given = dict(zip(self.graph.inputs, checked_inputs(self.graph, inputs), strict=True))
        fixed = {name: spec_of(tensor) for name, tensor in given.items()}
        return self._machine_for(fixed)

    def _machine_for(self, inputs: Mapping[str, TensorSpec]) -> "_Machine":
        return _Machine(self.graph, inputs, self._weights, self._runtime)


class _OtherSizesError(Exception):
    """An input's free axis has another size than the machine was built for."""


@dataclass
class _Slot:
    """An input: its fixed shape, its region, and the tensor that was bound to it last."""

    name: str
    spec: TensorSpec
    base: Base
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    pointer: int = -1


class _Machine:
    """A program for fixed sizes: its memory, its native segments and its fallbacks."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, TensorSpec],
        weights: WeightStore,
        runtime: NativeRuntime,
    ) -> None:
        self._graph, self._runtime = graph, runtime
        fixed = with_named_outputs(replace(graph, inputs=dict(inputs)))
        plan = plan_memory(fixed, infer(fixed, weights.specs))
        self._views = TorchViews(plan)
        self._uses: dict[Base, list[tuple[Program, int]]] = {}
        self._steps: list[Callable[[int], None]] = []
        self._has_fallbacks = False
        self._add_steps(fixed, Site(plan, fixed.weights, weights.packed_specs))
        once = [
            fallback_step(command, self._views)
            for command, work in zip(fixed.commands, plan.work, strict=True)
            if work is Work.ONCE
        ]
        self._returned = [self._views.number(name) for name in graph.outputs]
        self._outputs: tuple[Tensor, ...] | None = None
        self._give_own_memory(weights)
        self._run([_any_tokens(step) for step in once], ALL_TOKENS)
        self._slots = {
            name: _Slot(name, spec, operand_of(plan, name).base) for name, spec in inputs.items()
        }
        self._bound: Mapping[str, Tensor] | None = None
        self._expected: Set[str] = self._slots.keys()
        self._arena_base, self._arena_memory = arena_of(plan), new_memory(0)
        runtime.arena.reserve(plan.arena_bytes)

    def run(
        self, inputs: Mapping[str, Tensor], bound: Mapping[str, Tensor], tokens: int
    ) -> tuple[Tensor, ...]:
        if self._arena_memory is not self._runtime.arena.memory:
            self._arena_memory = self._runtime.arena.memory
            self._give(self._arena_base, self._arena_memory)
        if bound is not self._bound:
            self._take_bound(bound)
        if not self._expected <= inputs.keys():
            checked_inputs(self._graph, {**bound, **inputs})
        for name, tensor in inputs.items():
            slot = self._slots.get(name)
            if slot is None or (tensor is slot.tensor and tensor.data_ptr() == slot.pointer):
                continue
            self._bind(slot, tensor)
            if name in bound:
                self._bound = None  # for this run only
        try:
            self._run(self._steps, tokens)
        except IndexError as error:
            raise IndexError(f"program {self._graph.name}: {error}") from error
        except RuntimeError as error:  # of what torch ran
            raise RuntimeError(f"program {self._graph.name}: {error}") from error
        if self._outputs is None:
            self._outputs = tuple(self._views.tensors[number] for number in self._returned)
        return self._outputs

    def _take_bound(self, bound: Mapping[str, Tensor]) -> None:
        """Bind what stays, and see what every run must be given."""
        for name, tensor in bound.items():
            if name in self._slots:
                self._bind(self._slots[name], tensor)
        self._bound, self._expected = bound, self._slots.keys() - bound.keys()

    def _run(self, steps: list[Callable[[int], None]], tokens: int) -> None:
        with torch.no_grad() if self._has_fallbacks else nullcontext():
            for step in steps:
                step(tokens)

    def _bind(self, slot: _Slot, tensor: Tensor) -> None:
        check_input(self._graph, slot.name, tensor)
        if not slot.spec.matches(tensor):
            raise _OtherSizesError
        if not tensor.is_contiguous():
            raise ValueError(
                f"program {self._graph.name}: input {slot.name!r} has strides {tensor.stride()}; "
                "make it contiguous"
            )
        self._give(slot.base, tensor)
        slot.tensor, slot.pointer = tensor, tensor.data_ptr()

    def _give(self, base: Base, memory: Tensor) -> None:
        """Let everything that reads or writes the region do so where ``memory`` starts."""
        for program, number in self._uses.get(base, ()):
            program.bind(number, memory.data_ptr(), memory.nbytes)
        self._views.move(base, memory)
        self._outputs = None

    def _give_own_memory(self, weights: WeightStore) -> None:
        """Bind weights, and what the program alone needs: its outputs and constants."""
        self._own: list[Tensor] = []
        for base in {*self._uses, *self._views.bases}:
            if base.kind is Kind.WEIGHT:
                memory = weights.copy(base.name, base.layout)
            elif base.kind in (Kind.OUTPUT, Kind.CONSTANT):
                memory = new_memory(base.nbytes)
            else:
                continue
            self._own.append(memory)  # kernels hold addresses only
            self._give(base, memory)

    def _add_steps(self, graph: Graph, site: Site) -> None:
        compiler = self._runtime.compiler
        steps = list(compiler.steps(graph, site))
        rows = token_rows(graph, site.plan, steps)
        for part in joined(steps):
            if isinstance(part, Fallback):
                self._steps.append(_any_tokens(fallback_step(part.command, self._views)))
                self._has_fallbacks = True
                continue
            kernels = [
                step.kernels if rows is None else rows.limited(step, site.plan) for step in part
            ]
            segment = compiler.segment(chain.from_iterable(kernels))
            self._steps.append(partial(segment.program.run, self._runtime.pool))
            for number, base in enumerate(segment.bases):
                self._uses.setdefault(base, []).append((segment.program, number))


def _any_tokens(step: Callable[[], None]) -> Callable[[int], None]:
    return lambda _tokens: step()


def with_named_outputs(graph: Graph) -> Graph:
    """Name results that nobody reads: a kernel needs a place for them."""
    taken = set(graph.values())
    commands = []
    for index, command in enumerate(graph.commands):
        names = []
        for position, name in enumerate(command.outputs):
            unread = f"unread.{index}.{position}"
            while unread in taken:
                unread += "'"
            names.append(name or unread)
        commands.append(replace(command, outputs=tuple(names)))
    return replace(graph, commands=tuple(commands))
