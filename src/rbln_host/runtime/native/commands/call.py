# SPDX-License-Identifier: Apache-2.0
"""A program's command as kernels see it: its arguments as operands and plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rbln_host.compiler.arguments import arguments_of
from rbln_host.compiler.graph import Command, Ref, TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.plan import Plan
from rbln_host.runtime.native.operands import Operand, operand_of, weight_operand


class Unclaimed(Exception):  # noqa: N818 (an answer, not an error)
    """No native command does this one's work; says why."""


@dataclass(frozen=True)
class NativeCommand:
    """A kernel with its operands, outputs last. None stands for an optional one that is absent."""

    op: str
    operands: tuple[Operand | None, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    by_token: bool = False
    """Whether a run may leave out rows of padding, see tokens.py."""


@dataclass(frozen=True)
class Site:
    """The program around a command: where values lie, and the weights that are there packed."""

    plan: Plan
    values: Mapping[str, str]
    """Value -> weight, as in the program."""
    packed: Mapping[str, TensorSpec]
    """Weights with a packed copy."""


class Call:
    """A command's arguments as operands and plain values."""

    def __init__(self, command: Command, site: Site) -> None:
        self._command, self._site = command, site
        self._arguments = arguments_of(command)

    def __getitem__(self, name: str) -> Operand:
        """The tensor argument called ``name``."""
        found = self.optional(name)
        if found is None:
            raise Unclaimed(f"{name} is not a tensor")
        return found

    def optional(self, name: str) -> Operand | None:
        argument = self._arguments.get(name)
        return operand_of(self._site.plan, argument.name) if isinstance(argument, Ref) else None

    def tensors(self, name: str) -> list[Operand]:
        """A list of tensors."""
        return [operand_of(self._site.plan, item.name) for item in self._arguments[name]]

    def packed(self, name: str) -> tuple[Operand, TensorSpec] | None:
        """The packed copy of the weight that ``name`` is, and the weight's own shape."""
        argument = self._arguments.get(name)
        weight = self._site.values.get(argument.name) if isinstance(argument, Ref) else None
        spec = self._site.packed.get(weight) if weight is not None else None
        if weight is None or spec is None:
            return None
        return weight_operand(weight, spec, Layout.ROWS16), spec

    def weight(self, name: str) -> Operand:
        found = self.packed(name)
        if found is None:
            raise Unclaimed("its weight is not a packed one")
        return found[0]

    def number(self, name: str) -> float:
        value = self._arguments[name]
        if not isinstance(value, bool | int | float):
            raise Unclaimed(f"{name} is not a number")
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        return [float(item) for item in self._arguments[name]]

    def text(self, name: str) -> str:
        return str(self._arguments[name])

    def value(self, name: str) -> object:
        return self._arguments.get(name)

    def output(self, index: int = 0) -> Operand:
        name = self._command.outputs[index]
        if name is None:
            raise Unclaimed("its result is not named")
        return operand_of(self._site.plan, name)


Builder: TypeAlias = Callable[[Call], list[NativeCommand]]
"""What the native commands for a call are; raises Unclaimed."""
