# SPDX-License-Identifier: Apache-2.0
"""Functions and modules stay small enough to be read at once."""

from __future__ import annotations

import ast

from tests.unit.source_tree import SRC, Source, sources

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 340

# What is over a limit today, with its length. It may shrink and leave; nothing may join or grow.
LONG_FUNCTIONS: dict[str, int] = {}
LONG_MODULES: dict[str, int] = {}


def function_lengths(source: Source) -> dict[str, int]:
    """Lines of each function without its decorators, under `path::name`; of a name the longest."""
    lengths: dict[str, int] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{source.path}::{node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            lengths[name] = max(length, lengths.get(name, 0))
    return lengths


def over(lengths: dict[str, int], limit: int) -> dict[str, int]:
    return {name: length for name, length in lengths.items() if length > limit}


def check_exceptions(lengths: dict[str, int], limit: int, exceptions: dict[str, int]) -> None:
    """The exceptions are exactly what is over the limit, at exactly its present length."""
    found = over(lengths, limit)
    advice = "make it smaller, or its entry here if it has shrunk"
    assert found == exceptions, f"over {limit} lines: {found}; {advice}"


def test_functions_are_short() -> None:
    lengths: dict[str, int] = {}
    for source in sources():
        lengths.update(function_lengths(source))
    assert len(lengths) > 1
    check_exceptions(lengths, MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def test_modules_are_short() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in sources()}
    check_exceptions(lengths, MAX_MODULE_LINES, LONG_MODULES)


def test_lengths_are_counted_from_def_to_last_line() -> None:
    text = """\
@decorator
def f():
    a = 1

    return a


class C:
    async def g(self): ...


class D:
    def f(self):
        return 1
"""
    assert function_lengths(Source("a.py", text)) == {"a.py::f": 4, "a.py::g": 1}


def test_every_file_names_its_licence() -> None:
    licence = "SPDX-License-Identifier: Apache-2.0"
    texts = {source.path: source.text for source in sources()}
    texts |= {str(path): path.read_text() for path in SRC.rglob("*.pyi")}
    assert [path for path, text in texts.items() if not text.startswith(f"# {licence}")] == []
    native = [path for path in SRC.rglob("native/**/*") if path.suffix in (".cc", ".h")]
    assert native
    assert [path for path in native if not path.read_text().startswith(f"// {licence}")] == []
