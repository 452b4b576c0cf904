# SPDX-License-Identifier: Apache-2.0
"""Pass: rotating query and key and writing key and value becomes ``rbln::rotary_write_kv``."""

from collections.abc import Sequence

from rbln_host.compiler.graph import Captured, Command
from rbln_host.compiler.passes.match import ref
from rbln_host.compiler.passes.rewrite import Editor, rewrite

_ROTARY = "rbln::rotary_embedding"


def fuse_rotary_write(captured: Captured) -> Captured:
    """Fuse ``write_kv`` of a rotated key with the rotation of the query at the same positions.

    The key's rotation has no other reader, and the query's is read after the write only: it moves
    to the place of the write.
    """
    queries: list[Command] = []
    """Rotations so far that nothing has read."""

    def rule(editor: Editor, command: Command) -> Sequence[Command] | None:
        if command.operator == _ROTARY and command.outputs[0]:
            queries.append(command)
        if command.operator != "rbln::write_kv" or command.kwargs:
            return None
        key, value, kv_cache, slots = command.args
        rotated_key = editor.producer(key)
        if rotated_key is None or rotated_key.operator != _ROTARY or not _is_sole(editor, key):
            return None
        query = _query(editor, queries, rotated_key)
        if query is None:
            return None
        queries.clear()
        editor.remove(str(query.outputs[0]))
        source, positions, table, neox = rotated_key.args
        args = (query.args[0], source, value, positions, table, kv_cache, slots, neox)
        return [Command("rbln::rotary_write_kv", "default", args, {}, query.outputs)]

    if not any(command.operator == _ROTARY for command in captured.graph.commands):
        return captured
    return rewrite(captured, rule, roots=frozenset({_ROTARY, "rbln::write_kv"}))


def _is_sole(editor: Editor, argument: object) -> bool:
    name = ref(argument)
    return name is not None and editor.facts.reads[name] == 1


def _query(editor: Editor, rotations: Sequence[Command], key: Command) -> Command | None:
    """The latest rotation like the key's that is read after this place only."""
    for rotation in reversed(rotations):
        name = str(rotation.outputs[0])
        alike = rotation.args[1:] == key.args[1:]
        later = all(place > editor.place for place in editor.facts.readers[name])
        if alike and later and editor.is_stable(*rotation.args, *key.args):
            return rotation
    return None
