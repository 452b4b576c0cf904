# SPDX-License-Identifier: Apache-2.0
"""Pass: what programs compute from the weight of a norm each time becomes a weight.

Gemma's norms scale by ``1 + weight``, in fp32: ``weight@float32+1.0`` is stored once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rbln_host.compiler.graph import Captured, Command
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor, Made, rewrite
from rbln_host.compiler.serial import dtype_name


def fold_weights(captured: Captured, made: Made | None = None) -> Captured:
    """Fold casts and sums with a number of weights with one axis."""

    def rule(editor: Editor, command: Command) -> list[Command] | None:
        folding = _folding(command)
        output = command.outputs[0] if command.outputs else None
        if folding is None or output is None:
            return None
        weight = editor.weight(command.args[0])
        tensor = editor.weight_tensor(command.args[0])
        if weight is None or tensor is None or tensor.dim() != 1:
            return None
        suffix, fold = folding
        folded = editor.new_weight(f"{weight}{suffix}", (weight,), fold)
        editor.alias(output, folded.name)
        return []

    weights = captured.graph.weights
    if not any(_folding(c) and ref(c.args[0]) in weights for c in captured.graph.commands):
        return captured
    return rewrite(captured, rule, made=made)


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
