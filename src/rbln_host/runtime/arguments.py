# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands that torch runs: names become places in a list, looked up at each call."""

from collections.abc import Callable, Sequence
from typing import Any

from rbln_host.compiler.graph import Argument, Ref


class _Place(int):
    """An index into the values, to be told from an integer that is an argument itself."""


def placed(argument: Argument, place_of: Callable[[str], int]) -> Any:
    """The argument for :func:`fetched`; ``place_of`` tells where the value of a name will be."""
    if isinstance(argument, Ref):
        return _Place(place_of(argument.name))
    if isinstance(argument, tuple):
        return [placed(item, place_of) for item in argument]
    return argument


def fetched(argument: Any, values: Sequence[Any]) -> Any:
    """The argument with ``values`` in their places."""
    if type(argument) is _Place:
        return values[argument]
    if type(argument) is list:
        return [fetched(item, values) for item in argument]
    return argument
