# SPDX-License-Identifier: Apache-2.0
"""Pass: a view that lies in memory exactly as an earlier value is that value.

It is what is left of reshapes there and back, slices of everything, casts to the same dtype and
dropout that drops nothing.
"""

from typing import Any

from rbln_host.compiler.graph import Captured, Command
from rbln_host.compiler.operators import resolve
from rbln_host.compiler.passes.rewrite import Editor, rewrite
from rbln_host.compiler.shapes import memory


def drop_views(captured: Captured) -> Captured:
    """Replace each value by the first of the same memory, offset, shape, strides and dtype."""
    first: dict[Any, str] = {}

    def rule(editor: Editor, command: Command) -> list[Command] | None:
        if not first:
            for name in (*captured.graph.inputs, *captured.graph.weights):
                first.setdefault(_place(editor, name), name)
        alike = 0
        for name in filter(None, command.outputs):
            known = first.setdefault(_place(editor, name), name)
            if known != name:
                editor.alias(name, known)
                alike += 1
        gone = alike and alike == sum(1 for name in command.outputs if name)
        changes = resolve(command.operator, command.overload)._schema.is_mutable
        return [] if gone and not changes else None

    return rewrite(captured, rule)


def _place(editor: Editor, name: str) -> Any:
    tensor = editor.facts.tensors[name]
    offset = tensor.storage_offset()
    return (memory(tensor), offset, tensor.shape, tensor.stride(), tensor.dtype)
