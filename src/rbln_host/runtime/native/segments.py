# SPDX-License-Identifier: Apache-2.0
"""From a planned program to what runs: stretches of native commands, and fallbacks between them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.plan import Work
from rbln_host.compiler.serial import dtype_name
from rbln_host.runtime.native.commands.call import NativeCommand, Site, Unclaimed
from rbln_host.runtime.native.commands.claim import claim
from rbln_host.runtime.native.extension import Extension, Program
from rbln_host.runtime.native.operands import Base, Operand


@dataclass(frozen=True)
class Fallback:
    """A command that torch runs, and why no kernel does."""

    command: Command
    reason: str


@dataclass(frozen=True)
class Native:
    """A command and the kernels that do its work."""

    command: Command
    kernels: tuple[NativeCommand, ...]


Step = Native | Fallback


@dataclass(frozen=True)
class Segment:
    """A native program and its base regions, by their numbers in it."""

    program: Program
    bases: tuple[Base, ...]


@dataclass(frozen=True)
class Compiler:
    """Turns commands into native programs for one instruction set."""

    extension: Extension = field(repr=False)
    isa: str

    def steps(self, graph: Graph, site: Site) -> Iterator[Step]:
        """Every command that has work to do in each run, in order."""
        for command, work in zip(graph.commands, site.plan.work, strict=True):
            if work is Work.EVERY_RUN:
                yield self._step(command, site)

    def segment(self, kernels: Iterable[NativeCommand]) -> Segment:
        """One native program. Raises ValueError for a command that the kernels do not take."""
        bases: dict[Base, int] = {}
        commands = [self._native(kernel, bases) for kernel in kernels]
        sizes = [base.nbytes for base in bases]
        return Segment(self.extension.Program(commands, sizes, self.isa), tuple(bases))

    def _step(self, command: Command, site: Site) -> Step:
        try:
            kernels = claim(command, site)
            self.segment(kernels)  # the kernels' own checks
        except (Unclaimed, ValueError) as error:
            return Fallback(command, str(error))
        return Native(command, kernels)

    def _native(self, kernel: NativeCommand, bases: dict[Base, int]) -> object:
        tensors = [None if o is None else self._tensor(o, bases) for o in kernel.operands]
        return self.extension.Command(
            kernel.op, tensors, dict(kernel.numbers), kernel.text, kernel.by_token
        )

    def _tensor(self, operand: Operand, bases: dict[Base, int]) -> object:
        number = bases.setdefault(operand.base, len(bases))
        return self.extension.Tensor(
            number, operand.offset, dtype_name(operand.dtype), operand.shape, operand.strides
        )


def joined(steps: Iterable[Step]) -> Iterator[list[Native] | Fallback]:
    """Neighbouring native steps together."""
    stretch: list[Native] = []
    for step in steps:
        if isinstance(step, Native):
            stretch.append(step)
            continue
        if stretch:
            yield stretch
            stretch = []
        yield step
    if stretch:
        yield stretch
