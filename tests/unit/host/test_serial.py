# SPDX-License-Identifier: Apache-2.0
"""Program files: any argument survives, and anything that is no program is an ArtifactError."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rbln_host.compiler.graph import Command, Graph, Ref, TensorSpec
from rbln_host.compiler.serial import (
    FORMAT,
    MAX_NESTING,
    argument_from_json,
    argument_to_json,
    dtype_from_name,
    dtype_name,
    dumps,
    loads,
)
from rbln_host.errors import ArtifactError
from tests.unit.host.programs import call, scale_program

ENUMS = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.strided,
    torch.device("cpu"),
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text()
    | st.sampled_from(ENUMS)
    | st.text().map(Ref)
)
ARGUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8
)
GRAPH = Graph(
    "p",
    {"x": TensorSpec((-1, 4), torch.float32)},
    {"p_w": "w"},
    (
        call("add", "x", "p_w", out="a"),
        Command("aten::split", "Tensor", (Ref("a"), 2, -1), {}, ("b", None), True),
        Command("aten::cat", "default", ((Ref("b"), Ref("b")),), {"dim": 0}, ("c",)),
    ),
    ("c", "x"),
)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, all the way down; a NaN equals itself."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@settings(max_examples=300)
@given(ARGUMENTS)
@example(float("inf"))
@example((float("-inf"), (float("nan"), (-0.0,))))
@example({"$ref": "not a reference"}.__str__())
@example(True)
@example(1.0)
@example(5e-324)
def test_arguments_round_trip(argument: Any) -> None:
    text = json.dumps(argument_to_json(argument), allow_nan=False)
    assert same(argument_from_json(json.loads(text)), argument)


def test_graphs_round_trip() -> None:
    assert loads(dumps(GRAPH)) == GRAPH
    assert dumps(loads(dumps(GRAPH))) == dumps(GRAPH)
    assert loads(dumps(scale_program("q", {"w": torch.ones(2)}).graph)).name == "q"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "float8_e5m2"])
def test_dtype_names(name: str) -> None:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    assert dtype_from_name(dtype_name(dtype)) is dtype
    assert "." not in dtype_name(dtype)


@pytest.mark.parametrize(
    "argument",
    [
        1j,
        torch.channels_last_3d,
        torch.sparse_coo,
        torch.device("meta"),
        torch.ones(1),
        {"a": 1},
        [1],
        b"x",
        (1, (2, 3j)),
    ],
)
def test_what_no_file_can_hold_is_refused_when_written(argument: Any) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        argument_to_json(argument)


def document() -> Any:
    return json.loads(dumps(GRAPH))


def edit(change: Callable[[Any], object]) -> bytes:
    edited = document()
    change(edited)
    return json.dumps(edited).encode()


def command(**changes: object) -> Callable[[Any], object]:
    return lambda d: d["commands"][0].update(changes)


def argument(value: object) -> Callable[[Any], object]:
    return lambda d: d["commands"][0].update(args=[{"$ref": "x"}, value])


def spec(value: object) -> Callable[[Any], object]:
    return lambda d: d["inputs"].update(x=value)


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "truncated": dumps(GRAPH)[:-1],
    "no JSON": b"\x80\x04\x95pickle",
    "no text": b'{"format": 1, "name": "\xff"}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "deeply nested": b"[" * 200_000,
    "deeply nested argument": edit(argument(json.loads("[" * 900 + "]" * 900))),
    "an argument nested too deeply": edit(argument(json.loads("[" * 10 + "]" * 10))),
    "a number of 5000 digits": b'{"format": ' + b"9" * 5000 + b"}",
    "another format": edit(lambda d: d.update(format=FORMAT + 1)),
    "no format": edit(lambda d: d.pop("format")),
    "no name": edit(lambda d: d.pop("name")),
    "name is a number": edit(lambda d: d.update(name=1)),
    "inputs are a list": edit(lambda d: d.update(inputs=[])),
    "weights are a list": edit(lambda d: d.update(weights=["p_w"])),
    "a weight is a number": edit(lambda d: d.update(weights={"p_w": 1})),
    "commands are an object": edit(lambda d: d.update(commands={"0": 1})),
    "a command is a string": edit(lambda d: d.update(commands=["aten::add"])),
    "a command is null": edit(lambda d: d.update(commands=[None])),
    "outputs are a string": edit(lambda d: d.update(outputs="cx")),
    "an output is a number": edit(lambda d: d.update(outputs=[1])),
    "axis is infinite": edit(spec(["float32", 4])).replace(b"4]", b"1e999]", 1),
    "axis is a fraction": edit(spec(["float32", 1.5])),
    "axis is text": edit(spec(["float32", "4"])),
    "axis is true": edit(spec(["float32", True])),
    "axis is below -1": edit(spec(["float32", -2])),
    "axis is enormous": edit(spec(["float32", 10**30])),
    "shape is text": edit(spec("float32")),
    "shape is empty": edit(spec([])),
    "unknown dtype": edit(spec(["float33", 4])),
    "dtype is a list": edit(spec([[], 4])),
    "unknown namespace": edit(command(op="os::system")),
    "unknown operator": edit(command(op="aten::nothing")),
    "unknown overload": edit(command(overload="nothing")),
    "operator is a number": edit(command(op=1)),
    "reads a file": edit(command(op="aten::from_file", overload="default")),
    "sets a storage": edit(command(op="aten::set_", overload="source_Storage")),
    "writes a file": edit(command(op="aten::save", overload="default", args=[1, "/tmp/x"], out=[])),
    "an attribute of torch": edit(command(op="aten::__class__", overload="default")),
    "arguments are an object": edit(command(args={"$ref": "x"})),
    "arguments are a string": edit(command(args="xy")),
    "keywords are a list": edit(command(kwargs=[1])),
    "unknown keyword": edit(command(kwargs={"beta": 1})),
    "an argument twice": edit(command(kwargs={"other": 1})),
    "too many arguments": edit(command(args=[{"$ref": "x"}, {"$ref": "x"}, 1, 1])),
    "no output": edit(command(out=[])),
    "too many outputs": edit(command(out=["a", "q"])),
    "a tuple that is none": edit(command(tuple=True)),
    "tuple is a number": edit(command(tuple=1)),
    "output is a number": edit(command(out=[1])),
    "undefined value": edit(argument({"$ref": "nowhere"})),
    "undefined in a list": edit(argument([[{"$ref": "nowhere"}]])),
    "a value defined twice": edit(command(out=["b"])),
    "an input overwritten": edit(command(out=["x"])),
    "an input and a weight": edit(lambda d: d["weights"].update(x="w")),
    "undefined output": edit(lambda d: d.update(outputs=["nowhere"])),
    "reference to a number": edit(argument({"$ref": 1})),
    "unknown tag": edit(argument({"$code": "import os"})),
    "two tags": edit(argument({"$ref": "x", "$dtype": "bool"})),
    "no tag": edit(argument({})),
    "unknown enum": edit(argument({"$device": "cuda"})),
    "enum of a list": edit(argument({"$dtype": ["bool"]})),
    "float of a number": edit(argument({"$float": 1})),
    "float of a list": edit(argument({"$float": [1]})),
    "float of a word": edit(argument({"$float": "infinity"})),
    "an integer of 65 bits": edit(argument(2**63)),
    "an integer in a list": edit(argument([-(2**63) - 1])),
    "NaN outside JSON": edit(argument(float("nan"))),
    "infinity outside JSON": edit(argument(float("inf"))),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_hostile_files_are_refused(case: str) -> None:
    with pytest.raises(ArtifactError):
        loads(HOSTILE[case])


def test_hostile_cases_are_edits_of_a_good_file() -> None:
    assert loads(edit(lambda d: None)) == GRAPH
    assert loads(edit(argument(1))).commands[0].args == (Ref("x"), 1)
    nested: Any = 1
    for _ in range(MAX_NESTING - 1):
        nested = [nested]
    loads(edit(argument(nested)))


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        loads(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    st.sampled_from(("format", "name", "inputs", "weights", "commands", "outputs"))
    | st.sampled_from(("op", "overload", "args", "kwargs", "out", "tuple")),
    JSON,
)
def test_any_other_value_is_refused_or_harmless(field: str, value: Any) -> None:
    edited = document()
    (edited if field in edited else edited["commands"][0])[field] = value
    try:
        graph = loads(json.dumps(edited).encode())
    except ArtifactError:
        return
    assert loads(dumps(graph)) == graph
