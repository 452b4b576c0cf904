# SPDX-License-Identifier: Apache-2.0
"""Pass: values that are only another name of their input become that input."""

from rbln_host.compiler.graph import Graph, Ref
from rbln_host.compiler.passes.rename import rebuilt, rename

_ALIASES = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh"})


def drop_aliases(graph: Graph) -> Graph:
    """Replace values that are only another name of their input by that input."""
    names: dict[str, str] = {}
    kept = []
    for command in graph.commands:
        renamed = rename(command, names)
        source = renamed.args[0] if renamed.args else None
        output = renamed.outputs[0] if renamed.outputs else None
        if renamed.operator in _ALIASES and isinstance(source, Ref) and output:
            names[output] = source.name
        else:
            kept.append(renamed)
    return rebuilt(graph, kept, names)
