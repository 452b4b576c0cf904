# SPDX-License-Identifier: Apache-2.0
"""Pass: bias, activation and residual become part of the linear before them."""

from collections.abc import Sequence
from dataclasses import replace

from rbln_host.compiler.graph import Argument, Captured, Command
from rbln_host.compiler.passes.activations import ACTIVATION_ROOTS, activation_of, is_square
from rbln_host.compiler.passes.rewrite import Editor, rewrite

_INPUT, _WEIGHT, _BIAS, _RESIDUAL, _ACTIVATION = range(5)
"""Places of the arguments of ``rbln::linear``."""


def fuse_linear(captured: Captured) -> Captured:
    """Put what follows a linear, and alone reads its result, into it.

    In the order of the operator: a sum with a weight of one axis is the bias, then an activation,
    then a sum with a value of the result's shape is the residual.
    """

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        if not command.outputs or command.outputs[0] is None:
            return None
        fused = _with_activation(editor, command)
        if fused is None and command.operator == "aten::add":
            fused = _with_sum(editor, command)
        return None if fused is None else [replace(fused, outputs=command.outputs)]

    return rewrite(captured, rule, roots=ACTIVATION_ROOTS | {"aten::add"})


def is_plain(command: Command | None) -> bool:
    """Whether it is a linear that has neither activation nor residual yet."""
    if command is None or command.operator != "rbln::linear":
        return False
    return command.args[_RESIDUAL] is None and command.args[_ACTIVATION] == "none"


def _with_activation(editor: Editor, command: Command) -> Command | None:
    found = activation_of(editor, command)
    if found is None:
        return _with_square(editor, command)
    name, source, inner = found
    linear = editor.producer(source)
    if linear is None or not is_plain(linear) or not _may_move(editor, linear):
        return None
    commands = {id(one): one for one in (*inner.commands, command)}.values()
    if editor.facts.reads[source.name] != sum(one.args.count(source) for one in commands):
        return None
    return _with(linear, _ACTIVATION, name)


def _with_square(editor: Editor, command: Command) -> Command | None:
    """The square of a linear that has a ``relu`` already."""
    linear = editor.producer(command.args[0])
    if linear is None or linear.operator != "rbln::linear" or not is_square(command):
        return None
    if linear.args[_RESIDUAL:] != (None, "relu") or not _may_move(editor, linear):
        return None
    reads = command.args.count(command.args[0])
    sole = editor.facts.reads[command.args[0].name] == reads
    return _with(linear, _ACTIVATION, "relu2") if sole else None


def _with_sum(editor: Editor, command: Command) -> Command | None:
    if command.kwargs or len(command.args) != 2:
        return None
    one, other = command.args
    return _with_addend(editor, command, other, one) or _with_addend(editor, command, one, other)


def _with_addend(
    editor: Editor, command: Command, source: Argument, addend: Argument
) -> Command | None:
    """The linear that makes ``source`` with ``addend`` as its bias or residual."""
    linear = editor.producer(source)
    tensor, added = editor.tensor(source), editor.tensor(addend)
    if linear is None or linear.operator != "rbln::linear" or tensor is None or added is None:
        return None
    if editor.facts.reads[source.name] != 1 or added.dtype != tensor.dtype:
        return None
    if not _may_move(editor, linear) or not editor.is_stable(addend):
        return None
    if added.shape == tensor.shape and linear.args[_RESIDUAL] is None:
        return _with(linear, _RESIDUAL, addend)
    is_bias = added.shape == tensor.shape[-1:] and linear.args[_BIAS] is None
    if is_bias and is_plain(linear) and editor.weight(addend) is not None:
        return _with(linear, _BIAS, addend)
    return None


def _may_move(editor: Editor, linear: Command) -> bool:
    """Whether the linear gives the same at the place of a later command."""
    return editor.is_stable(*linear.args)


def _with(linear: Command, place: int, argument: Argument) -> Command:
    args = (*linear.args[:place], argument, *linear.args[place + 1 :])
    return replace(linear, args=args)
