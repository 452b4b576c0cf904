# SPDX-License-Identifier: Apache-2.0
"""Passes, graph to graph: drop what does nothing, compute equal values once, drop the unread."""

from dataclasses import replace
from typing import Any

from rbln_host.compiler.graph import Command, Graph, Ref, substitute
from rbln_host.compiler.operators import is_pure

_ALIASES = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh"})


def optimise(graph: Graph) -> Graph:
    """All passes in order."""
    return drop_unread(share_equal(drop_aliases(graph)))


def drop_aliases(graph: Graph) -> Graph:
    """Replace values that are only another name of their input by that input."""
    names: dict[str, str] = {}
    kept = []
    for command in graph.commands:
        renamed = _rename(command, names)
        source = renamed.args[0] if renamed.args else None
        output = renamed.outputs[0] if renamed.outputs else None
        if renamed.operator in _ALIASES and isinstance(source, Ref) and output:
            names[output] = source.name
        else:
            kept.append(renamed)
    return _rebuilt(graph, kept, names)


def share_equal(graph: Graph) -> Graph:
    """Compute commands with equal operator and arguments once.

    Only pure commands are shared, and none that reads a value some command writes to: such a
    value differs between two places of the program.
    """
    written = _written_values(graph)
    names: dict[str, str] = {}
    seen: dict[Any, Command] = {}
    kept = []
    for command in graph.commands:
        renamed = _rename(command, names)
        if not is_pure(renamed.operator, renamed.overload) or written.intersection(
            (*renamed.inputs(), *filter(None, renamed.outputs))
        ):
            kept.append(renamed)
            continue
        key = _identity(renamed)
        first = seen.setdefault(key, renamed)
        if first is renamed:
            kept.append(renamed)
        else:
            _merge(first, renamed, seen, kept, key, names)
    return _rebuilt(graph, kept, names)


def _merge(
    first: Command,
    second: Command,
    seen: dict[Any, Command],
    kept: list[Command],
    key: Any,
    names: dict[str, str],
) -> None:
    """Point the second command's outputs at the first's, adding outputs only the second reads."""
    outputs = list(first.outputs)
    for index, name in enumerate(second.outputs):
        if name is None:
            continue
        if outputs[index] is None:
            outputs[index] = name
        else:
            names[name] = str(outputs[index])
    merged = replace(first, outputs=tuple(outputs))
    kept[next(i for i, c in enumerate(kept) if c is first)] = merged
    seen[key] = merged


def drop_unread(graph: Graph) -> Graph:
    """Remove pure commands whose outputs nobody reads."""
    read = set(graph.outputs)
    kept = []
    for command in reversed(graph.commands):
        needed = any(name in read for name in command.outputs if name)
        if needed or not is_pure(command.operator, command.overload):
            read.update(command.inputs())
            kept.append(command)
    weights = {name: weight for name, weight in graph.weights.items() if name in read}
    return replace(graph, commands=tuple(reversed(kept)), weights=weights)


def _written_values(graph: Graph) -> set[str]:
    """Values some command writes to, with every view of them and what they are views of."""
    from rbln_host.compiler.operators import is_view, resolve

    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while name in roots:
            name = roots[name]
        return name

    mutated: set[str] = set()
    for command in graph.commands:
        first = next(command.inputs(), None)
        if is_view(command.operator, command.overload) and first is not None:
            for output in filter(None, command.outputs):
                roots[output] = first
        schema = resolve(command.operator, command.overload)._schema
        for argument, value in zip(schema.arguments, command.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Ref):
                mutated.add(root(value.name))
    every = {*graph.inputs, *graph.weights, *roots, *mutated}
    return {name for name in every if root(name) in mutated}


def _identity(command: Command) -> Any:
    """Equal for two commands exactly when they compute the same (1 and 1.0 and True differ)."""
    return (command.operator, command.overload, repr(command.args), repr(command.kwargs))


def _rename(command: Command, names: dict[str, str]) -> Command:
    if not names:
        return command
    return replace(
        command,
        args=substitute(command.args, names),
        kwargs={key: substitute(value, names) for key, value in command.kwargs.items()},
    )


def _rebuilt(graph: Graph, commands: list[Command], names: dict[str, str]) -> Graph:
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return replace(graph, commands=tuple(commands), outputs=outputs)
