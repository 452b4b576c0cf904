# SPDX-License-Identifier: Apache-2.0
"""Pass: root-mean-square norms written out become ``rbln::rms_norm``, and those of a sum
``rbln::fused_add_rms_norm``.

A norm is put together step by step, and each step is what the operator says of itself::

    h * rsqrt(mean(h²) + epsilon)         -> rms_norm(h)
    rms_norm(h) * weight                  -> rms_norm(h, weight)
    rms_norm(x.float(), weight).to(bf16)  -> rms_norm(x, weight)
"""

from collections.abc import Sequence

import torch

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.canonicalise import FLOATS
from rbln_host.compiler.passes.match import Either, Number, Op, Var, match_command, ref
from rbln_host.compiler.passes.rewrite import Editor, rewrite

_H = Var("hidden")
_SQUARE = Either(
    (Op("aten::pow", _H, Number(2.0)), Op("aten::square", _H), Op("aten::mul", _H, _H))
)
_MEAN = Op("aten::add", Op("aten::mean", _SQUARE, Var("axes"), True), Var("epsilon"))
_NORMED = Either(
    (
        Op("aten::mul", Op("aten::rsqrt", _MEAN), _H),
        Op("aten::div", _H, Op("aten::sqrt", _MEAN)),
    )
)


_ROOTS = frozenset({"aten::mul", "aten::div", "aten::to"})


def fuse_norm(captured: Captured) -> Captured:
    """Fuse what Hugging Face's RMSNorm computes, Gemma's included, and then sums before norms."""
    return _fuse_sums(rewrite(captured, _written_out, roots=_ROOTS))


def _written_out(editor: Editor, command: Command) -> Sequence[Command] | None:
    fused = None
    if command.operator == "aten::mul":
        fused = _normed(editor, command) or _weighted(editor, command)
    elif command.operator == "aten::div":
        fused = _normed(editor, command)
    elif (command.operator, command.overload) == ("aten::to", "dtype"):
        fused = _narrowed(editor, command)
    return None if fused is None else [fused]


def _normed(editor: Editor, command: Command) -> Command | None:
    found = match_command(editor, _NORMED, command)
    if found is None or not found.is_private(editor, command):
        return None
    hidden, axes, epsilon = (found.found[key] for key in ("hidden", "axes", "epsilon"))
    tensor = editor.tensor(hidden)
    if tensor is None or tensor.dtype not in FLOATS or type(epsilon) not in {int, float}:
        return None
    if axes not in {(-1,), (tensor.dim() - 1,)} or not editor.is_stable(hidden):
        return None
    return _rms_norm(command, hidden, None, float(epsilon), 0)


def _weighted(editor: Editor, command: Command) -> Command | None:
    if command.kwargs or len(command.args) != 2:
        return None
    for normed, weight in (command.args, command.args[::-1]):
        norm = _sole_norm(editor, normed)
        tensor, scale = editor.tensor(normed), editor.tensor(weight)
        if norm is None or norm.args[1] is not None or tensor is None or scale is None:
            continue
        fits = scale.shape == tensor.shape[-1:] and scale.dtype == tensor.dtype
        if fits and editor.is_stable(norm.args[0], weight):
            return _rms_norm(command, norm.args[0], weight, *norm.args[2:])
    return None


def _narrowed(editor: Editor, command: Command) -> Command | None:
    """The cast of a norm back to the dtype from which its input was cast to fp32."""
    norm = _sole_norm(editor, command.args[0])
    widened = None if norm is None else editor.producer(norm.args[0])
    if norm is None or widened is None or len(command.args) != 2 or command.kwargs:
        return None
    if (widened.operator, widened.overload, len(widened.args)) != ("aten::to", "dtype", 2):
        return None
    hidden, weight = editor.tensor(widened.args[0]), editor.tensor(norm.args[1])
    if hidden is None or hidden.dtype != command.args[1] or hidden.dtype not in FLOATS:
        return None
    if widened.args[1] != torch.float32 or not editor.is_stable(widened.args[0], *norm.args):
        return None
    if weight is not None and weight.dtype != torch.float32:
        return None
    return _rms_norm(command, widened.args[0], *norm.args[1:])


def _sole_norm(editor: Editor, argument: Argument) -> Command | None:
    """The norm whose result the argument is, when nobody else reads it."""
    norm, name = editor.producer(argument), ref(argument)
    if norm is None or name is None or norm.operator != "rbln::rms_norm":
        return None
    return norm if editor.facts.reads[name] == 1 else None


def _rms_norm(
    command: Command, hidden: Argument, weight: Argument, epsilon: float, variance_size: int
) -> Command:
    args = (hidden, weight, epsilon, variance_size)
    return Command("rbln::rms_norm", "default", args, {}, command.outputs)


def _fuse_sums(captured: Captured) -> Captured:
    commands = captured.graph.commands
    fused: set[int] = set()

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        if editor.place in fused:
            return []
        if command.operator != "aten::add" or not _is_sum(editor, command):
            return None
        total = str(command.outputs[0])
        if not editor.is_stable(Ref(total)):
            return None
        for place in editor.facts.readers[total]:
            norm = commands[place] if place < len(commands) else None
            if norm is not None and _norms(editor, norm, total):
                fused.add(place)
                kept = total if editor.facts.reads[total] > 1 else None
                args = (*command.args, *norm.args[1:])
                outputs = (norm.outputs[0], kept)
                return [Command("rbln::fused_add_rms_norm", "default", args, {}, outputs, True)]
        return None

    roots = frozenset({"aten::add", "rbln::rms_norm"})
    if not roots <= {command.operator for command in commands}:
        return captured
    return rewrite(captured, rule, roots=roots)


def _is_sum(editor: Editor, command: Command) -> bool:
    """Whether it adds two values of one shape and dtype."""
    if command.kwargs or len(command.args) != 2 or not command.outputs[0]:
        return False
    one, other = (editor.tensor(argument) for argument in command.args)
    if one is None or other is None or one.dtype not in FLOATS:
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _norms(editor: Editor, norm: Command, total: str) -> bool:
    """Whether it is the norm of this value with a weight that is there from the start."""
    if norm.operator != "rbln::rms_norm" or ref(norm.args[0]) != total:
        return False
    return norm.args[1] is None or editor.weight(norm.args[1]) is not None
