# SPDX-License-Identifier: Apache-2.0
"""Program files: a :class:`Graph` as JSON and back. Nothing in them is code.

Values that JSON lacks are objects with one ``$`` key: ``{"$ref": name}``, ``{"$dtype": name}``,
``{"$float": "inf"}`` and so on.
"""

import json
import math
from typing import Any

import torch

from rbln_host.compiler.graph import Argument, Command, Graph, Ref, TensorSpec
from rbln_host.compiler.operators import resolve
from rbln_host.errors import ArtifactError

FORMAT = 1

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
    """The program file of ``graph``."""
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
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise ArtifactError(f"program format {document['format']} is not {FORMAT}")
        return Graph(
            name=_text(document["name"]),
            inputs={_text(k): spec_from_json(v) for k, v in document["inputs"].items()},
            weights={_text(k): _text(v) for k, v in document["weights"].items()},
            commands=tuple(_command_from_json(c) for c in document["commands"]),
            outputs=tuple(_text(name) for name in document["outputs"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"not a program file: {error!r}") from error


def spec_to_json(spec: TensorSpec) -> list[Any]:
    """``[dtype, axis, axis, …]``."""
    return [dtype_name(spec.dtype), *spec.shape]


def spec_from_json(item: Any) -> TensorSpec:
    """The inverse of :func:`spec_to_json`."""
    dtype, *shape = item
    return TensorSpec(tuple(int(axis) for axis in shape), _DTYPES[dtype])


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
        "args": [_argument_to_json(a) for a in command.args],
        "kwargs": {name: _argument_to_json(a) for name, a in command.kwargs.items()},
        "out": list(command.outputs),
        "tuple": command.returns_tuple,
    }


def _command_from_json(item: dict[str, Any]) -> Command:
    operator, overload = _text(item["op"]), _text(item["overload"])
    resolve(operator, overload)
    return Command(
        operator=operator,
        overload=overload,
        args=tuple(_argument_from_json(a) for a in item["args"]),
        kwargs={_text(k): _argument_from_json(a) for k, a in item["kwargs"].items()},
        outputs=tuple(None if name is None else _text(name) for name in item["out"]),
        returns_tuple=bool(item["tuple"]),
    )


def _argument_to_json(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"$ref": argument.name}
    if isinstance(argument, tuple):
        return [_argument_to_json(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"$float": str(argument)}
    tag = _TAGS.get(type(argument))
    if tag is None:
        return argument
    return {tag: str(argument).removeprefix("torch.")}


def _argument_from_json(item: Any) -> Argument:
    if isinstance(item, list):
        return tuple(_argument_from_json(i) for i in item)
    if not isinstance(item, dict):
        return item
    ((tag, value),) = item.items()
    if tag == "$ref":
        return Ref(_text(value))
    if tag == "$float":
        return float(value)
    return _ENUMS[tag][value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value
