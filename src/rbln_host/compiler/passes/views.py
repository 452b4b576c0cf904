# SPDX-License-Identifier: Apache-2.0
"""Which part of another value a view is."""

from collections.abc import Iterator

from rbln_host.compiler.graph import Argument
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor


def joined(editor: Editor, first: Argument, rest: Argument) -> str | None:
    """The value whose last axis is ``first`` and then ``rest``, or None."""
    one, other = editor.tensor(first), editor.tensor(rest)
    if one is None or other is None or not one.dim() or not other.dim():
        return None
    size = one.shape[-1]
    for name in _common_sources(editor, first, rest):
        whole = editor.facts.tensors[name]
        start = whole.storage_offset()
        places = (one.storage_offset(), other.storage_offset())
        if (
            whole.shape == (*one.shape[:-1], size + other.shape[-1])
            and whole.stride() == one.stride() == other.stride()
            and places == (start, start + size * whole.stride(-1))
        ):
            return name
    return None


def halves(editor: Editor, first: Argument, second: Argument) -> str | None:
    """The same, where both are as large."""
    one, other = editor.tensor(first), editor.tensor(second)
    alike = one is not None and other is not None and one.shape == other.shape
    return joined(editor, first, second) if alike else None


def interleaved(editor: Editor, first: Argument, second: Argument) -> str | None:
    """The value whose last axis takes turns between ``first`` and ``second``, or None."""
    one, other = editor.tensor(first), editor.tensor(second)
    if one is None or other is None or not one.dim():
        return None
    for name in _common_sources(editor, first, second):
        whole = editor.facts.tensors[name]
        start, step = whole.storage_offset(), whole.stride(-1) if whole.dim() else 0
        places = (one.storage_offset(), other.storage_offset())
        if (
            whole.shape == (*one.shape[:-1], 2 * one.shape[-1])
            and one.stride() == other.stride() == (*whole.stride()[:-1], 2 * step)
            and places == (start, start + step)
        ):
            return name
    return None


def _common_sources(editor: Editor, first: Argument, second: Argument) -> Iterator[str]:
    """Values that both are views of, nearest to the first one first."""
    others = {*_sources(editor, second)}
    return (name for name in _sources(editor, first) if name in others)


def _sources(editor: Editor, argument: Argument) -> Iterator[str]:
    known = editor.facts.tensors
    while (command := editor.producer(argument)) is not None and command.args:
        name, source = ref(argument), ref(command.args[0])
        if name not in known or source not in known or source is None or name is None:
            return
        if not editor.facts.share_memory(name, source):
            return
        yield source
        argument = command.args[0]
