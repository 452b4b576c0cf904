# SPDX-License-Identifier: Apache-2.0
"""Which part of another value a view is."""

from collections.abc import Iterator

from rbln_host.compiler.graph import Argument
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor


def halves(editor: Editor, first: Argument, second: Argument) -> str | None:
    """The value whose last axis is ``first`` and then ``second``, or None."""
    return _whole(editor, first, second, interleaved=False)


def interleaved(editor: Editor, first: Argument, second: Argument) -> str | None:
    """The value whose last axis takes turns between ``first`` and ``second``, or None."""
    return _whole(editor, first, second, interleaved=True)


def sources(editor: Editor, argument: Argument) -> Iterator[str]:
    """The values that the argument is a view of, nearest first."""
    while (command := editor.producer(argument)) is not None and command.args:
        name, source = ref(argument), ref(command.args[0])
        if name is None or source is None or not _shares(editor, name, source):
            return
        yield source
        argument = command.args[0]


def _shares(editor: Editor, name: str, source: str) -> bool:
    known = editor.facts.tensors
    return name in known and source in known and editor.facts.share_memory(name, source)


def _whole(editor: Editor, first: Argument, second: Argument, *, interleaved: bool) -> str | None:
    one, other = editor.tensor(first), editor.tensor(second)
    if one is None or other is None or one.shape != other.shape or not one.dim():
        return None
    if one.stride() != other.stride():
        return None
    size = one.shape[-1]
    for name in sources(editor, first):
        whole = editor.facts.tensors[name]
        if whole.shape != (*one.shape[:-1], 2 * size):
            continue
        step = whole.stride(-1)
        strides = (*whole.stride()[:-1], 2 * step if interleaved else step)
        start = whole.storage_offset()
        apart = step if interleaved else size * step
        places = (one.storage_offset(), other.storage_offset())
        shared = name in sources(editor, second)
        if shared and one.stride() == strides and places == (start, start + apart):
            return name
    return None
