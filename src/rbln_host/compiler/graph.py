# SPDX-License-Identifier: Apache-2.0
"""The program form: a flat list of commands over named values.

A command applies one operator of the ``aten`` or ``rbln`` namespace. Arguments are plain data in
which :class:`Ref` stands for a value; that is all a program file holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rbln_host.compiler.adapters import Adapters

Argument = Any
"""``None``, bool, int, float, str, ``torch.dtype``, ``torch.device``, ``torch.layout``,
``torch.memory_format``, :class:`Ref`, or a tuple of these."""


@dataclass(frozen=True)
class Ref:
    """A use of the value called ``name``."""

    name: str


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a value; an axis of -1 takes any size (the KV pool's number of blocks)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if any(axis < -1 for axis in self.shape):
            raise ValueError(f"negative axis in shape {self.shape}")

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has this dtype and, axis by axis, this shape."""
        return (
            tensor.dtype == self.dtype
            and tensor.dim() == len(self.shape)
            and all(want in (-1, have) for want, have in zip(self.shape, tensor.shape, strict=True))
        )


@dataclass(frozen=True)
class Command:
    """``outputs = operator(*args, **kwargs)``; an output nobody reads is ``None``."""

    operator: str
    overload: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    outputs: tuple[str | None, ...]
    returns_tuple: bool = False

    def inputs(self) -> tuple[str, ...]:
        """Names of the values this command reads."""
        return self._inputs

    @cached_property
    def _inputs(self) -> tuple[str, ...]:
        """Asked for by every pass, and a command never changes."""
        return (*references(self.args), *references(tuple(self.kwargs.values())))


@dataclass(frozen=True)
class Graph:
    """A static-shape program: inputs and weights in, commands in order, outputs out.

    Raises ValueError when a value is read before it exists or defined twice.
    """

    name: str
    inputs: dict[str, TensorSpec]
    weights: dict[str, str] = field(repr=False)
    """Value name -> weight name in the artifact."""
    commands: tuple[Command, ...] = field(repr=False)
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        defined = {*self.inputs, *self.weights}
        if len(defined) != len(self.inputs) + len(self.weights):
            raise ValueError(f"{self.name}: a value is both an input and a weight")
        for command in self.commands:
            for name in command.inputs():
                if name not in defined:
                    raise ValueError(f"{self.name}: {command.operator} reads undefined {name!r}")
            for output in filter(None, command.outputs):
                if output in defined:
                    raise ValueError(f"{self.name}: value {output!r} is defined twice")
                defined.add(output)
        for output in self.outputs:
            if output not in defined:
                raise ValueError(f"{self.name}: output {output!r} is undefined")

    def values(self) -> Iterator[str]:
        """Names of all values."""
        yield from self.inputs
        yield from self.weights
        for command in self.commands:
            yield from filter(None, command.outputs)


@dataclass(frozen=True)
class Captured:
    """A program and the weights it reads, by the names the artifact will use."""

    graph: Graph
    weights: Mapping[str, torch.Tensor]
    """Weight name -> tensor, for exactly the names in ``graph.weights``."""
    adapters: "Adapters | None" = None
    """The adapters it is still to take; passes attach them last."""


def references(argument: Argument) -> Iterator[str]:
    """Names of the values used in ``argument``, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def substitute(argument: Argument, names: dict[str, str]) -> Argument:
    """``argument`` with every reference renamed through ``names``."""
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(substitute(item, names) for item in argument)
    return argument
