# SPDX-License-Identifier: Apache-2.0
"""Commands that torch runs on a program's memory."""

from collections.abc import Callable

from torch import Tensor

from rbln_host.compiler.graph import Command
from rbln_host.compiler.operators import resolve
from rbln_host.runtime.arguments import fetched, placed
from rbln_host.runtime.native.memory import TorchViews


def fallback_step(command: Command, views: TorchViews) -> Callable[[], None]:
    """A call of the command's operator; what it allocates is copied to where the plan wants it."""
    function = resolve(command.operator, command.overload)
    args = [placed(argument, views.number) for argument in command.args]
    kwargs = {name: placed(argument, views.number) for name, argument in command.kwargs.items()}
    targets = [(i, views.number(name)) for i, name in enumerate(command.outputs) if name]
    tensors = views.tensors
    as_tuple = command.returns_tuple

    def step() -> None:
        result = function(
            *[fetched(a, tensors) for a in args],
            **{name: fetched(a, tensors) for name, a in kwargs.items()},
        )
        for index, number in targets:
            _keep(result[index] if as_tuple else result, tensors[number])

    return step


def _keep(result: Tensor, place: Tensor) -> None:
    if result.data_ptr() != place.data_ptr():
        place.copy_(result)
