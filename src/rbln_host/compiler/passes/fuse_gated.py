# SPDX-License-Identifier: Apache-2.0
"""Pass: ``activation(gate) * up`` over the two halves of one value becomes one command."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.activations import activation_of
from rbln_host.compiler.passes.canonicalise import FLOATS
from rbln_host.compiler.passes.fuse_linear import is_plain
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor, rewrite
from rbln_host.compiler.passes.views import halves

GATED_ROWS = 16
"""``rbln::gated_linear`` takes gates of a multiple of this many features."""


def fuse_gated(captured: Captured) -> Captured:
    """Make ``rbln::gated_linear`` where the halves are those of a linear that nobody else reads,
    and ``rbln::gated_activation`` elsewhere. The gate is the first half."""

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        if command.operator == "rbln::gated_activation":
            fused = _with_linear(editor, command, command.args[0], command.args[1])
            reads = editor.facts.reads[command.args[0].name]
            return [fused] if fused is not None and reads == 1 else None
        gating = _gating(editor, command)
        if gating is None or not _is_fusable(editor, gating.both):
            return None
        both = gating.both
        fused = None
        if _reads_only(editor, both, gating):
            fused = _with_linear(editor, command, Ref(both), gating.activation)
        args = (Ref(both), gating.activation)
        return [fused or Command("rbln::gated_activation", "default", args, {}, command.outputs)]

    return rewrite(captured, rule, roots=frozenset({"aten::mul", "rbln::gated_activation"}))


@dataclass(frozen=True)
class Gating:
    """``activation(gate) * up``."""

    activation: str
    gate: Argument
    up: Argument
    both: str
    """The value whose halves they are; empty when they are none."""
    inner: tuple[Command, ...]
    """The commands of the activation."""


def gatings(editor: Editor, command: Command) -> Iterator[Gating]:
    """The ways in which the product is of an activation, which nobody else reads, and a value."""
    if command.operator != "aten::mul" or command.kwargs or len(command.args) != 2:
        return
    for gated, up in (command.args, command.args[::-1]):
        producer, name = editor.producer(gated), ref(gated)
        if producer is None or name is None or ref(up) is None or editor.facts.reads[name] != 1:
            continue
        found = activation_of(editor, producer)
        if found is not None:
            activation, gate, inner = found
            both = halves(editor, gate, up) or ""
            yield Gating(activation, gate, up, both, (*inner.commands, producer))


def _gating(editor: Editor, command: Command) -> Gating | None:
    return next((gating for gating in gatings(editor, command) if gating.both), None)


def _is_fusable(editor: Editor, both: str) -> bool:
    return editor.facts.tensors[both].dtype in FLOATS and editor.facts.is_stable(both)


def _reads_only(editor: Editor, both: str, gating: Gating) -> bool:
    """Whether the value is read through its two halves alone, and those by the gating alone."""
    views = {id(v): v for v in map(editor.producer, (gating.gate, gating.up)) if v is not None}
    direct = [view for view in views.values() if view.args and view.args[0] == Ref(both)]
    if len(direct) != len(views) or editor.facts.reads[both] != len(views):
        return False
    known = {ref(gating.gate), ref(gating.up)}
    outputs = [name for view in views.values() for name in view.outputs if name]
    if any(editor.facts.reads[name] for name in outputs if name not in known):
        return False
    inner = {id(command): command for command in gating.inner}.values()
    gate_reads = sum(command.args.count(gating.gate) for command in inner)
    return editor.facts.reads[gating.gate.name] == gate_reads and (
        editor.facts.reads[gating.up.name] == 1
    )


def _with_linear(
    editor: Editor, command: Command, both: Argument, activation: str
) -> Command | None:
    linear = editor.producer(both)
    if linear is None or not is_plain(linear) or not editor.is_stable(*linear.args):
        return None
    source, weight, bias = linear.args[:3]
    tensor = editor.weight_tensor(weight)
    if tensor is None or tensor.shape[0] % (2 * GATED_ROWS):
        return None
    args = (source, weight, bias, activation)
    return Command("rbln::gated_linear", "default", args, {}, command.outputs)
