# SPDX-License-Identifier: Apache-2.0
"""Program files: a :class:`Graph` as JSON and back. Nothing in them is code.

Values that JSON lacks are objects with one ``$`` key: ``{"$ref": name}``, ``{"$dtype": name}``,
``{"$float": "inf"}`` and so on.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from rbln_host.compiler.graph import Argument, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import resolve
from rbln_host.errors import ArtifactError

FORMAT = 1
MAX_NESTING = 8
"""Deepest list of lists an argument may be."""

_INT64 = range(-(1 << 63), 1 << 63)
_NOT_FINITE = ("inf", "-inf", "nan")
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_ENUMS: dict[str, dict[str, Any]] = {
    "$dtype": _DTYPES,
    "$layout": {"strided": torch.strided},
    "$device": {"cpu": torch.device("cpu")},
    "$memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
    },
}
_TAGS: dict[type, str] = {
    torch.dtype: "$dtype",
    torch.layout: "$layout",
    torch.device: "$device",
    torch.memory_format: "$memory_format",
}


def dumps(graph: Graph) -> bytes:
    """The program file of ``graph``. Raises ValueError for an argument no file can hold."""
    document = {
        "format": FORMAT,
        "name": graph.name,
        "inputs": {name: spec_to_json(spec) for name, spec in graph.inputs.items()},
        "weights": graph.weights,
        "commands": [_command_to_json(command) for command in graph.commands],
        "outputs": list(graph.outputs),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def loads(data: bytes) -> Graph:
    """The graph in a program file; ArtifactError for anything that is not one."""
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
        if document["format"] != FORMAT:
            raise ArtifactError(f"program format {document['format']} is not {FORMAT}")
        return Graph(
            name=_text(document["name"]),
            inputs={_text(k): spec_from_json(v) for k, v in document["inputs"].items()},
            weights={_text(k): _text(v) for k, v in document["weights"].items()},
            commands=tuple(_command_from_json(c) for c in _list(document["commands"])),
            outputs=tuple(_text(name) for name in _list(document["outputs"])),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"not a program file: {error!r:.200}") from error


def spec_to_json(spec: TensorSpec) -> list[Any]:
    """``[dtype, axis, axis, …]``."""
    return [dtype_name(spec.dtype), *spec.shape]


def spec_from_json(item: Any) -> TensorSpec:
    """The inverse of :func:`spec_to_json`."""
    dtype, *shape = _list(item)
    return TensorSpec(tuple(_integer(axis) for axis in shape), dtype_from_name(dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`; KeyError for an unknown one."""
    return _DTYPES[name]


def _command_to_json(command: Command) -> dict[str, Any]:
    return {
        "op": command.operator,
        "overload": command.overload,
        "args": [argument_to_json(a) for a in command.args],
        "kwargs": {name: argument_to_json(a) for name, a in command.kwargs.items()},
        "out": list(command.outputs),
        "tuple": command.returns_tuple,
    }


def _command_from_json(item: dict[str, Any]) -> Command:
    command = Command(
        operator=_text(item["op"]),
        overload=_text(item["overload"]),
        args=tuple(argument_from_json(a) for a in _list(item["args"])),
        kwargs={_text(k): argument_from_json(a) for k, a in item["kwargs"].items()},
        outputs=tuple(None if name is None else _text(name) for name in _list(item["out"])),
        returns_tuple=_flag(item["tuple"]),
    )
    _check_call(command)
    return command


def _check_call(command: Command) -> None:
    """Raise ValueError unless the command takes and returns what its operator does."""
    schema = resolve(command.operator, command.overload)._schema
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    given = [*positional[: len(command.args)], *command.kwargs]
    known = {a.name for a in schema.arguments}
    if len(command.args) > len(positional) or len({*given}) != len(given) or not known >= {*given}:
        raise ValueError(f"arguments of {command.operator} do not fit {schema}")
    results = [str(result.type) for result in schema.returns]
    as_tuple = len(results) > 1 or results == ["List[Tensor]"]
    some = results == ["List[Tensor]"] or len(command.outputs) == len(results)
    if command.returns_tuple != as_tuple or not some:
        raise ValueError(f"outputs of {command.operator} do not fit {schema}")


def argument_to_json(argument: Argument) -> Any:
    """``argument`` as plain JSON; ValueError when a program file cannot hold it."""
    if isinstance(argument, Ref):
        return {"$ref": argument.name}
    if isinstance(argument, tuple):
        return [argument_to_json(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"$float": str(argument)}
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    tag = _TAGS.get(type(argument), "")
    name = str(argument).removeprefix("torch.")
    if name not in _ENUMS.get(tag, {}):
        raise ValueError(f"a program file cannot hold {argument!r} of {type(argument)}")
    return {tag: name}


def argument_from_json(item: Any, depth: int = 0) -> Argument:
    """The inverse of :func:`argument_to_json`. Raises ValueError, KeyError or TypeError."""
    if depth > MAX_NESTING:
        raise ValueError(f"an argument is nested deeper than {MAX_NESTING}")
    if isinstance(item, list):
        return tuple(argument_from_json(i, depth + 1) for i in item)
    if isinstance(item, Mapping):
        return _tagged(item)
    if isinstance(item, int) and item not in _INT64:
        raise ValueError("an integer needs more than 64 bits")
    return item


def _tagged(item: Mapping[str, Any]) -> Argument:
    ((tag, value),) = item.items()
    if tag == "$ref":
        return Ref(_text(value))
    if tag == "$float":
        if value not in _NOT_FINITE:
            raise ValueError(f"$float is one of {_NOT_FINITE}")
        return float(value)
    return _ENUMS[tag][value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value)}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or value not in _INT64:
        raise TypeError("expected a 64-bit integer")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {type(value)}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {type(value)}")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
