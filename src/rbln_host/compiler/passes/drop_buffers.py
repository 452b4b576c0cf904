# SPDX-License-Identifier: Apache-2.0
"""Pass: a new buffer that is filled by one copy is the copied value itself.

::

    empty = empty((8, 576))                        out = view(attention, (8, 576))
    view  = view(empty, (-1, 9, 64))      ->
    copy  = copy_(view, attention)
    out   = view(copy, (-1, 576))
"""

from dataclasses import dataclass, field

from rbln_host.compiler.graph import Captured, Command, Ref
from rbln_host.compiler.operators import is_pure, is_uninitialised
from rbln_host.compiler.passes.facts import Facts, written
from rbln_host.compiler.passes.rewrite import Editor, rewrite
from rbln_host.compiler.shapes import memory


@dataclass
class _Buffer:
    """Memory that an ``empty`` made: its names, and the commands before it is filled."""

    name: str
    views: list[Command] = field(default_factory=list)
    copies: list[Command] = field(default_factory=list)
    is_plain: bool = True
    """Whether before the first copy only views were made, and nothing else ever writes to it."""


def drop_buffers(captured: Captured) -> Captured:
    """Replace buffers that one ``copy_`` fills whole by what it copies.

    Left alone: a buffer that anything else writes to or that is read before the copy, and a copy
    of an input or a weight, or of a value that is not contiguous, has another dtype or is written
    to somewhere.
    """
    if not any(command.operator == "aten::copy_" for command in captured.graph.commands):
        return captured
    facts = Facts(captured)
    buffers = _buffers(captured, facts)
    filled = {
        memory(facts.tensors[buffer.name]): buffer
        for buffer in buffers
        if _is_filled_once(buffer, facts)
    }
    if not filled:
        return captured

    def rule(editor: Editor, command: Command) -> list[Command] | None:
        if is_uninitialised(command.operator):
            name = command.outputs[0]
            return [] if name and memory(facts.tensors[name]) in filled else None
        target = next(iter(command.inputs()), None)
        if target is None or target not in facts.tensors:
            return None
        buffer = filled.get(memory(facts.tensors[target]))
        if buffer is None:
            return None
        if any(command.outputs == view.outputs for view in buffer.views):
            return []
        return _filled(editor, buffer, command) if command.operator == "aten::copy_" else None

    return rewrite(captured, rule, facts=facts)


def _filled(editor: Editor, buffer: _Buffer, copy: Command) -> list[Command]:
    """The buffer and its views, as views of the value that is copied."""
    target, source = copy.args[0], copy.args[1]
    shape = tuple(editor.facts.tensors[buffer.name].shape)
    if copy.outputs[0]:
        editor.alias(copy.outputs[0], target.name)
    whole = Command("aten::view", "default", (source, shape), {}, (buffer.name,))
    return [whole, *buffer.views]


def _buffers(captured: Captured, facts: Facts) -> list[_Buffer]:
    found: dict[int, _Buffer] = {}
    for command in captured.graph.commands:
        name = command.outputs[0] if command.outputs else None
        if name and is_uninitialised(command.operator):
            found[memory(facts.tensors[name])] = _Buffer(name)
            continue
        for place in {memory(facts.tensors[read]) for read in command.inputs()} & found.keys():
            _note_use(found[place], command, facts)
    return list(found.values())


def _note_use(buffer: _Buffer, command: Command, facts: Facts) -> None:
    writes = any(facts.share_memory(name, buffer.name) for name in written(command))
    if writes:
        buffer.copies.append(command)
        buffer.is_plain &= command.operator == "aten::copy_" and len(buffer.copies) == 1
    elif not buffer.copies:
        outputs = [name for name in command.outputs if name]
        views = all(facts.share_memory(name, buffer.name) for name in outputs)
        pure = is_pure(command.operator, command.overload)
        reads = {name for name in command.inputs() if not facts.share_memory(name, buffer.name)}
        buffer.is_plain &= views and pure and not reads
        buffer.views.append(command)


def _is_filled_once(buffer: _Buffer, facts: Facts) -> bool:
    if not buffer.is_plain or not buffer.copies:
        return False
    copy = buffer.copies[0]
    plain = len(copy.args) == 2 and not copy.kwargs and isinstance(copy.args[1], Ref)
    if not plain:
        return False
    whole = facts.tensors[buffer.name]
    target, source = facts.tensors[copy.args[0].name], facts.tensors[copy.args[1].name]
    return (
        whole.is_contiguous()
        and target.is_contiguous()
        and target.numel() == whole.numel()
        and source.is_contiguous()
        and source.shape == target.shape
        and source.dtype == target.dtype
        and facts.is_stable(copy.args[1].name)
        and facts.is_computed(copy.args[1].name)
    )
