# SPDX-License-Identifier: Apache-2.0
"""Commands that torch runs on a program's memory."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rbln_host.compiler.graph import Argument, Command, Ref
from rbln_host.compiler.operators import resolve
from rbln_host.runtime.native.memory import TorchViews


class _Number(int):
    """The number of a view inside an argument."""


def fallback_step(command: Command, views: TorchViews) -> Callable[[], None]:
    """A call of the command's operator; what it allocates is copied to where the plan wants it."""
    function = resolve(command.operator, command.overload)
    args = [_placed(argument, views) for argument in command.args]
    kwargs = {name: _placed(argument, views) for name, argument in command.kwargs.items()}
    targets = [(i, views.number(name)) for i, name in enumerate(command.outputs) if name]
    tensors = views.tensors
    as_tuple = command.returns_tuple

    def step() -> None:
        result = function(
            *[_fetch(a, tensors) for a in args],
            **{name: _fetch(a, tensors) for name, a in kwargs.items()},
        )
        for index, number in targets:
            _keep(result[index] if as_tuple else result, tensors[number])

    return step


def _keep(result: Tensor, place: Tensor) -> None:
    if result.data_ptr() != place.data_ptr():
        place.copy_(result)


def _placed(argument: Argument, views: TorchViews) -> Any:
    if isinstance(argument, Ref):
        return _Number(views.number(argument.name))
    if isinstance(argument, tuple):
        return [_placed(item, views) for item in argument]
    return argument


def _fetch(argument: Any, tensors: list[Tensor]) -> Any:
    if type(argument) is _Number:
        return tensors[argument]
    if type(argument) is list:
        return [_fetch(item, tensors) for item in argument]
    return argument
