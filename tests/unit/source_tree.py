# SPDX-License-Identifier: Apache-2.0
"""The source files as syntax trees, for tests of how code is written rather than what it does."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Relative to `src/`, with forward slashes."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> list[str]:
        """Names of the packages that hold the module, outermost first."""
        return self.path.split("/")[:-1]

    def imports(self, *, at_import_time: bool = False) -> set[str]:
        """Dotted names that the file imports: modules and, for `from a import b`, also `a.b`.

        With `at_import_time`, only what runs when the module is imported: no function bodies and
        nothing below `if TYPE_CHECKING`.
        """
        nodes = _import_time_nodes(self.tree) if at_import_time else ast.walk(self.tree)
        return {name for node in nodes for name in self._imported(node)}

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self.package[: len(self.package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


@functools.cache
def sources() -> tuple[Source, ...]:
    """All Python files below `src/`."""
    files = sorted(SRC.rglob("*.py"))
    return tuple(Source(file.relative_to(SRC).as_posix(), file.read_text()) for file in files)


def imports_of(names: set[str], package: str) -> set[str]:
    """Those of some dotted names that are `package` or lie below it."""
    return {name for name in names if name == package or name.startswith(f"{package}.")}


def _import_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _import_time_nodes(other)
            continue
        yield node
        yield from _import_time_nodes(node)


def _is_import_call(node: ast.Call) -> bool:
    return ast.unparse(node.func) in ("__import__", "importlib.import_module", "import_module")
