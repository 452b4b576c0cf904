# SPDX-License-Identifier: Apache-2.0
"""Which two values are parts of one."""

from typing import Any

import pytest

from rbln_host.compiler.graph import Ref
from rbln_host.compiler.passes.rewrite import Editor
from rbln_host.compiler.passes.views import halves, interleaved, joined
from tests.unit.host.passes.build import Build

END = 9223372036854775807


def parts(*calls: tuple[Any, ...]) -> tuple[str | None, str | None, str | None]:
    """What ``a`` and ``b`` are joined, as halves, and taking turns."""
    build = Build(x=(3, 3, 8), y=(3, 3, 8))
    for call in calls:
        build(*call)
    captured = build.captured("a", "b")
    editor = Editor(captured)
    editor.emit(captured.graph.commands)
    a, b = Ref("a"), Ref("b")
    return joined(editor, a, b), halves(editor, a, b), interleaved(editor, a, b)


def cut(name: str, *cutting: Any, source: str = "x") -> tuple[Any, ...]:
    return (f"{name} = slice.Tensor", source, *cutting)


JOINED: dict[str, list[tuple[Any, ...]]] = {
    "slices": [cut("a", 2, 0, 4), cut("b", 2, 4, END)],
    "pieces": [("a, b = chunk", "x", 2, -1)],
    "slices of pieces": [
        ("p, q = chunk", "x", 2, -1),
        cut("a", 2, 0, 4, source="p"),
        ("c, b = split.Tensor", "x", 4, -1),
    ],
}


@pytest.mark.parametrize("how", JOINED)
def test_halves(how: str) -> None:
    assert parts(*JOINED[how]) == ("x", "x", None)


def test_the_nearest_of_several() -> None:
    calls = [cut("p", 2, 0, 4), cut("a", 2, 0, 2, source="p"), cut("b", 2, 2, 4, source="p")]
    assert parts(*calls) == ("p", "p", None)


def test_parts_of_two_sizes() -> None:
    assert parts(cut("a", 2, 0, 6), cut("b", 2, 6, END)) == ("x", None, None)
    assert parts(cut("a", 2, 0, 8), cut("b", 2, 8, END)) == ("x", None, None)


def test_taking_turns() -> None:
    assert parts(cut("a", 2, 0, END, 2), cut("b", 2, 1, END, 2)) == (None, None, "x")


NEITHER: dict[str, list[tuple[Any, ...]]] = {
    "the second first": [cut("b", 2, 0, 4), cut("a", 2, 4, END)],
    "the odd first": [cut("b", 2, 0, END, 2), cut("a", 2, 1, END, 2)],
    "a gap": [cut("a", 2, 0, 3), cut("b", 2, 4, 7)],
    "an overlap": [cut("a", 2, 0, 5), cut("b", 2, 4, 8)],
    "not from the start": [cut("a", 2, 2, 5), cut("b", 2, 5, 8)],
    "not to the end": [cut("a", 2, 0, 3), cut("b", 2, 3, 6)],
    "two values": [cut("a", 2, 0, 4), cut("b", 2, 4, END, source="y")],
    "computed": [("n = neg", "x"), cut("a", 2, 0, 4), cut("b", 2, 4, END, source="n")],
    "another axis": [cut("a", 1, 0, 2), cut("b", 1, 2, END)],
    "every third": [cut("a", 2, 0, END, 3), cut("b", 2, 1, END, 3)],
    "every other of a part": [cut("a", 2, 0, 6, 2), cut("b", 2, 1, 6, 2)],
    "other rows": [
        cut("r", 1, 0, 2),
        cut("s", 1, 1, 3),
        cut("a", 2, 0, 4, source="r"),
        cut("b", 2, 4, END, source="s"),
    ],
    "turned parts": [
        ("t = transpose.int", "x", 0, 1),
        cut("a", 2, 0, 4, source="t"),
        cut("b", 2, 4, END),
    ],
    "turned turns": [
        ("t = transpose.int", "x", 0, 1),
        cut("a", 2, 0, END, 2, source="t"),
        cut("b", 2, 1, END, 2),
    ],
    "the same twice": [cut("a", 2, 0, 4), cut("b", 2, 0, 4)],
    "a single element": [
        ("v = select.int", "x", 0, 0),
        ("w = select.int", "v", 0, 0),
        ("a = select.int", "w", 0, 0),
        ("b = select.int", "w", 0, 1),
    ],
    "inputs": [("a = neg", "x"), ("b = neg", "y")],
}


@pytest.mark.parametrize("how", NEITHER)
def test_no_parts_of_one_value(how: str) -> None:
    assert parts(*NEITHER[how]) == (None, None, None)
