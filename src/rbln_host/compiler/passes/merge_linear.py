# SPDX-License-Identifier: Apache-2.0
"""Pass: linears over the same input become one, with their weights on top of each other.

Query, key and value projections become one and are split afterwards; so do gate and up, which
:func:`fuse_gated` then finds as the halves of one value.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rbln_host.compiler.graph import Argument, Captured, Command, Ref
from rbln_host.compiler.passes.activations import activation_of
from rbln_host.compiler.passes.canonicalise import linear_command
from rbln_host.compiler.passes.facts import Facts
from rbln_host.compiler.passes.fuse_gated import gatings
from rbln_host.compiler.passes.fuse_linear import is_plain
from rbln_host.compiler.passes.rewrite import Editor, Made, rewrite
from rbln_host.errors import ArtifactError


def merge_linear(captured: Captured, made: Made | None = None) -> Captured:
    """Merge plain linears over one value, all with or all without a bias.

    A linear that an activation or a sum follows is left for :func:`fuse_linear`, and one whose
    weight something else reads (a tied embedding) would have to be stored twice.
    The parts of a merged result are not contiguous; if a later command needs them to be, nothing
    is merged.
    """
    groups = _groups(captured)
    if not groups:
        return captured
    first = {id(group[0]): group for group in groups}
    rest = {id(command) for group in groups for command in group[1:]}

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        original = captured.graph.commands[editor.place]
        if id(original) in first:
            return _merged(editor, first[id(original)])
        return [] if id(original) in rest else None

    merged = rewrite(captured, rule, roots=frozenset({"rbln::linear"}), made=made)
    return merged if _can_run(merged) else captured


def _can_run(captured: Captured) -> bool:
    try:
        Facts(captured)
    except ArtifactError:
        return False
    return True


def _merged(editor: Editor, group: Sequence[Command]) -> list[Command]:
    weights = [command.args[1] for command in group]
    biases = [command.args[2] for command in group]
    weight = _stacked(editor, weights)
    bias = None if biases[0] is None else _stacked(editor, biases)
    output = editor.new_value(f"{group[0].outputs[0]}_merged")
    sizes = tuple(editor.facts.tensors[str(c.outputs[0])].shape[-1] for c in group)
    names = tuple(command.outputs[0] for command in group)
    split = Command("aten::split_with_sizes", "default", (Ref(output), sizes, -1), {}, names, True)
    return [linear_command(group[0].args[0], weight, output, bias=bias), split]


def _stacked(editor: Editor, arguments: Sequence[Argument]) -> Ref:
    names = [str(editor.weight(argument)) for argument in arguments]
    return editor.new_weight("|".join(names), names, _concatenated)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _groups(captured: Captured) -> list[list[Command]]:
    """Linears to merge, in the order in which their weights are stacked."""
    by_input = _candidates(captured)
    if all(len(commands) < 2 for commands in by_input.values()):
        return []
    survey = _Survey(captured)
    groups = []
    for commands in by_input.values():
        pairs = [pair for pair in survey.gated if all(c in commands for c in pair)]
        paired = {id(command) for pair in pairs for command in pair}
        alone = [c for c in commands if id(c) not in paired and survey.ends_plain(c)]
        if not survey.is_stable(commands[0]):
            continue
        groups += [pair for pair in (*pairs, alone) if len(pair) > 1 and _alike(pair)]
    return groups


def _candidates(captured: Captured) -> dict[Argument, list[Command]]:
    """Plain linears by their input, where each weight has no other reader."""
    graph = captured.graph
    reads: defaultdict[str, int] = defaultdict(int)
    for command in graph.commands:
        for name in command.inputs():
            reads[graph.weights.get(name, "")] += 1
    found: defaultdict[Argument, list[Command]] = defaultdict(list)
    for command in graph.commands:
        if not is_plain(command) or not command.outputs[0]:
            continue
        operands = [a for a in command.args[1:3] if a is not None]
        weights = [graph.weights.get(a.name, "") for a in operands]
        if all(weight and reads[weight] == 1 for weight in weights):
            found[command.args[0]].append(command)
    return found


def _alike(commands: Sequence[Command]) -> bool:
    return len({command.args[2] is None for command in commands}) == 1


class _Survey:
    """What becomes of the results of linears."""

    def __init__(self, captured: Captured) -> None:
        self.gated: list[list[Command]] = []
        """Gate and up, which meet in one product."""
        self._editor = Editor(captured)
        self._commands = captured.graph.commands
        for command in self._commands:
            for gating in gatings(self._editor, command):
                gate, up = map(self._editor.producer, (gating.gate, gating.up))
                if gate is None or up is None or not is_plain(gate) or not is_plain(up):
                    continue
                if gate.args[0] == up.args[0]:
                    self.gated.append([gate, up])
            self._editor.emit((command,))

    def is_stable(self, linear: Command) -> bool:
        """Whether the input is the same at the places of all linears that read it."""
        return self._editor.is_stable(*linear.args)

    def ends_plain(self, linear: Command) -> bool:
        """Whether nothing follows that could become part of this linear."""
        places = set(self._editor.facts.readers[str(linear.outputs[0])])
        readers = [self._commands[place] for place in places if place < len(self._commands)]
        return not any(
            reader.operator == "aten::add" or activation_of(self._editor, reader)
            for reader in readers
        )
