# SPDX-License-Identifier: Apache-2.0
"""Shapes, strides and shared memory of every value of a program, without running it.

The commands run on *meta* tensors, which have everything a tensor has but its elements.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbln_host.compiler.graph import Argument, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import resolve
from rbln_host.errors import ArtifactError

FREE_AXIS = 2
"""The size taken for an axis that may have any."""

_META = torch.device("meta")
_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What operators raise for arguments they do not take."""


def infer(graph: Graph, weights: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Every value of ``graph`` as a meta tensor: its shape, strides, offset and dtype.

    ``weights`` has the shape and dtype of each weight by its name in the artifact; weights and
    inputs are contiguous, and a free axis (-1) of an input has size ``FREE_AXIS``. Two values share
    memory exactly when :func:`same_memory` says so.
    Raises ArtifactError, with the command's name, for a command that its operator does not take,
    whose results do not fit its outputs or are no plain tensors, or that changes the shape or
    strides of its input in place; and for a weight that is not in ``weights``.
    """
    inference = _Inference(graph.name)
    for name, spec in graph.inputs.items():
        inference.define(name, _empty(spec))
    by_weight: dict[str, Tensor] = {}
    for name, weight in graph.weights.items():
        if weight not in weights:
            raise ArtifactError(f"program {graph.name} reads the weight {weight!r}: not there")
        if weight not in by_weight:
            by_weight[weight] = _empty(weights[weight])
        inference.define(name, by_weight[weight])
    with torch.no_grad():
        for command in graph.commands:
            inference.run(command)
    return inference.values


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two values of one :func:`infer` are views of the same memory."""
    return memory(one) == memory(other)


def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor, as :func:`infer` takes them."""
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


class _Kind(NamedTuple):
    """What a command's results depend on in an input tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Number(NamedTuple):
    """A number that is no int. Its type tells 1, 1.0 and True apart."""

    type: type
    value: float


class _Layout(NamedTuple):
    """How a result lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    source: int | None
    """Which of the command's input tensors it is a view of; None when its memory is new."""
    offset: int
    """From its source's first element."""


class _Inference:
    """The values of one program so far."""

    def __init__(self, program: str) -> None:
        self.values: dict[str, Tensor] = {}
        self._program = program
        self._kinds: dict[str, _Kind] = {}

    def define(self, name: str, value: Tensor) -> None:
        self.values[name] = value
        self._kinds[name] = _Kind(value.shape, value.stride(), value.dtype)

    def run(self, command: Command) -> None:
        """Define the command's outputs."""
        try:
            results = self._results(command)
        except _REFUSALS as error:
            raise ArtifactError(f"{self._where(command)} cannot run: {error!r:.300}") from error
        if len(results) != len(command.outputs):
            raise ArtifactError(
                f"{self._where(command)} gives {len(results)} results, not {len(command.outputs)}"
            )
        for name, value in zip(command.outputs, results, strict=True):
            if name:
                self.define(name, value)

    def _results(self, command: Command) -> list[Tensor]:
        args = self._kind(command.args)
        kwargs = tuple([(name, self._kind(a)) for name, a in command.kwargs.items()])
        layouts = _layouts(command.operator, command.overload, args, kwargs)
        inputs = [self.values[name] for name in command.inputs()]
        if layouts is not None:
            return [_laid_out(layout, inputs) for layout in layouts]
        results = _call(
            command.operator,
            command.overload,
            self._placed(command.args),
            {name: self._placed(argument) for name, argument in command.kwargs.items()},
        )
        if not all(map(_is_plain, results)):
            raise ArtifactError(f"{self._where(command)} does not give plain tensors")
        return results

    def _kind(self, argument: Argument) -> Any:
        """Equal for two arguments from which a command makes results of one layout."""
        if isinstance(argument, Ref):
            return self._kinds[argument.name]
        if isinstance(argument, tuple):
            return tuple([self._kind(item) for item in argument])
        if isinstance(argument, bool | float):
            return _Number(type(argument), argument)
        return argument

    def _placed(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self.values[argument.name]
        if isinstance(argument, tuple):
            return [self._placed(item) for item in argument]
        return argument

    def _where(self, command: Command) -> str:
        return f"program {self._program}: {command.operator}.{command.overload}"


@lru_cache(maxsize=8192)
def _layouts(operator: str, overload: str, args: Any, kwargs: Any) -> tuple[_Layout, ...] | None:
    """How the results of a command on inputs of these kinds lie in memory.

    None when that depends on more than the kinds, or the results are no plain tensors. A model
    repeats its layers, so that most commands are like an earlier one.
    """
    if resolve(operator, overload)._schema.is_mutable:
        return None
    inputs: list[Tensor] = []
    placed = [_unkinded(kind, inputs) for kind in args]
    named = {name: _unkinded(kind, inputs) for name, kind in kwargs}
    memories = [memory(tensor) for tensor in inputs]
    layouts: list[_Layout] = []
    new: set[int] = set()
    for tensor in _call(operator, overload, placed, named):
        if not _is_plain(tensor):
            return None
        place = memory(tensor)
        offset = int(tensor.storage_offset())
        source = memories.index(place) if place in memories else None
        if source is not None and inputs[source].dtype != tensor.dtype:
            return None
        if source is None and (place in new or offset):
            return None
        new.add(place)
        layouts.append(_Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, source, offset))
    return tuple(layouts)


def _unkinded(kind: Any, inputs: list[Tensor]) -> Any:
    """An argument of this kind; its tensors are added to ``inputs``."""
    if isinstance(kind, _Kind):
        inputs.append(torch.empty_strided(*kind[:2], dtype=kind.dtype, device=_META))
        return inputs[-1]
    if isinstance(kind, _Number):
        return kind.value
    if isinstance(kind, tuple):
        return [_unkinded(item, inputs) for item in kind]
    return kind


def _laid_out(layout: _Layout, inputs: list[Tensor]) -> Tensor:
    if layout.source is None:
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=_META)
    source = inputs[layout.source]
    offset = source.storage_offset() + layout.offset
    return source.as_strided(layout.shape, layout.strides, offset)


def _call(operator: str, overload: str, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The results of an operator on meta tensors."""
    function, takes_device = _callable(operator, overload)
    placed = [_META if isinstance(argument, torch.device) else argument for argument in args]
    result = function(*placed, **{**kwargs, "device": _META} if takes_device else kwargs)
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]


@cache
def _callable(operator: str, overload: str) -> tuple[Any, bool]:
    """The operator, and whether it takes a keyword ``device`` (it makes a tensor of its own)."""
    function = resolve(operator, overload)
    if torch.Tag.inplace_view in function.tags:
        raise ArtifactError(f"operator {operator}.{overload} changes the shape of its input")
    keywords = (a.name for a in function._schema.arguments if a.kwarg_only)
    return function, "device" in keywords


def _empty(spec: TensorSpec) -> Tensor:
    shape = [FREE_AXIS if axis == -1 else axis for axis in spec.shape]
    try:
        return torch.empty(shape, dtype=spec.dtype, device=_META)
    except RuntimeError as error:  # more elements than an address can count
        raise ArtifactError(f"no tensor has the shape {spec.shape}: {error}") from error


def _is_plain(value: Any) -> bool:
    """A strided tensor whose elements are what its memory holds (no pending sign or conjugate)."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not value.is_conj() and not value.is_neg()


def memory(tensor: Tensor) -> int:
    """Equal for two values of one :func:`infer` exactly when they share memory."""
    return int(tensor.untyped_storage()._cdata)
