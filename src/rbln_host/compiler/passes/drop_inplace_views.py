# SPDX-License-Identifier: Apache-2.0
"""Pass: an operator that changes the shape of its input in place gives a view instead."""

from dataclasses import replace

import torch

from rbln_host.compiler.graph import Command, Graph
from rbln_host.compiler.operators import resolve
from rbln_host.compiler.passes.match import ref

_OVERLOADS = {"aten::transpose_": "int"}
"""Overloads of the operators that leave their input alone, where they have another name."""


def drop_inplace_views(graph: Graph) -> Graph:
    """Replace ``transpose_``, ``squeeze_``, ``unsqueeze_``, ``t_`` and the like.

    Their input stands for the changed tensor afterwards; where something still reads it, the
    command is left.
    """
    if not any(map(_changes_shape, graph.commands)):
        return graph
    read_later = set(graph.outputs)
    commands: list[Command] = []
    for command in reversed(graph.commands):
        if _changes_shape(command) and ref(command.args[0]) not in read_later:
            name, overload = command.operator, _OVERLOADS.get(command.operator, command.overload)
            operator = name.removesuffix("_")
            commands.append(replace(command, operator=operator, overload=overload))
        else:
            commands.append(command)
        read_later.update(command.inputs())
    return replace(graph, commands=tuple(reversed(commands)))


def _changes_shape(command: Command) -> bool:
    return torch.Tag.inplace_view in resolve(command.operator, command.overload).tags
