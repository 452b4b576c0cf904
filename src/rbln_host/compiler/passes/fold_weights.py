# SPDX-License-Identifier: Apache-2.0
"""Pass: what programs compute from certain weights each time becomes a weight.

Gemma's norms scale by ``1 + weight``, in fp32: ``weight@float32+1.0`` is stored once. So is a
table of which rows are looked up, in the dtype in which they are.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rbln_host.compiler.graph import Captured, Command, Ref
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor, Made, rewrite
from rbln_host.compiler.serial import dtype_name


def fold_weights(captured: Captured, made: Made | None = None) -> Captured:
    """Fold casts and sums with a number of weights with one axis, and casts of tables.

    Larger weights are left, since the program would keep both forms of them in memory.
    """
    weights = captured.graph.weights
    if not any(_folding(c) and ref(c.args[0]) in weights for c in captured.graph.commands):
        return captured

    def rule(editor: Editor, command: Command) -> list[Command] | None:
        folding = _folding(command)
        output = command.outputs[0] if command.outputs else None
        if folding is None or output is None:
            return None
        weight = editor.weight(command.args[0])
        tensor = editor.weight_tensor(command.args[0])
        if weight is None or tensor is None:
            return None
        if tensor.dim() != 1 and not _is_table(editor, output, captured.graph.commands):
            return None
        suffix, fold = folding
        folded = editor.new_weight(f"{weight}{suffix}", (weight,), fold)
        editor.alias(output, folded.name)
        return []

    return rewrite(captured, rule, made=made)


def _is_table(editor: Editor, output: str, commands: Sequence[Command]) -> bool:
    """Whether rows of the value are looked up, and nothing else is done with it."""
    readers = editor.facts.readers[output]
    lookups = (_LOOKUPS.get(commands[p].operator) if p < len(commands) else None for p in readers)
    return all(
        place is not None and commands[reader].args[place] == Ref(output)
        for reader, place in zip(readers, lookups, strict=True)
    )


_LOOKUPS = {"aten::index_select": 0, "rbln::rotary_embedding": 2, "rbln::rotary_write_kv": 4}
"""Which argument of an operator is the table."""


def _folding(command: Command) -> tuple[str, Callable[[Sequence[Tensor]], Tensor]] | None:
    """The suffix of the new weight's name, and how it is made."""
    if command.kwargs or len(command.args) != 2:
        return None
    argument = command.args[1]
    if command.operator == "aten::add" and type(argument) in {int, float}:
        return f"+{float(argument)}", lambda parts: parts[0] + argument
    is_cast = (command.operator, command.overload) == ("aten::to", "dtype")
    if is_cast and isinstance(argument, torch.dtype):
        return f"@{dtype_name(argument)}", lambda parts: parts[0].to(argument)
    return None
