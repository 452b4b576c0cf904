# SPDX-License-Identifier: Apache-2.0
"""Which blocks hold which sub-blocks. Free of vLLM's pool: it is told, and answers.

A block holds sub-blocks of one prompt, from its own first slot on without gaps. Several blocks
may hold the same sub-block: requests that compute it at the same time, and every copy.
"""

from collections.abc import Iterator, Sequence

from vllm.v1.core.kv_cache_utils import BlockHash


class SubBlockIndex:
    """Sub-block name to the ids of its holders, and back.

    The first holder is kept apart from further ones: most names have one, and an int costs the
    garbage collector nothing.
    """

    def __init__(self) -> None:
        self._first: dict[BlockHash, int] = {}
        self._more: dict[BlockHash, set[int]] = {}
        self._held: dict[int, list[BlockHash]] = {}

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._first

    def __len__(self) -> int:
        """Counts names that have a holder."""
        return len(self._first)

    def holders(self, name: BlockHash) -> Iterator[int]:
        """Yields the ids of the blocks that hold ``name``."""
        if name in self._first:
            yield self._first[name]
            yield from self._more.get(name, ())

    def count(self, block_id: int) -> int:
        """Returns how many sub-blocks the block holds."""
        return len(self._held.get(block_id, ()))

    def held(self, block_id: int) -> Sequence[BlockHash]:
        """Returns the names the block holds, in the order of its slots."""
        return tuple(self._held.get(block_id, ()))

    def add(self, block_id: int, names: Sequence[BlockHash]) -> list[int]:
        """Records that the block now also holds ``names``, the next ones of its prompt.

        Returns:
            The positions in ``names`` of those that had no holder before.
        """
        self._held.setdefault(block_id, []).extend(names)
        return [i for i, name in enumerate(names) if self._add_holder(name, block_id)]

    def drop(self, block_id: int) -> list[BlockHash]:
        """Forgets the block.

        Returns:
            The names that have no holder any more, the deepest first.
        """
        names = self._held.pop(block_id, None)
        if names is None:
            return []
        return [name for name in reversed(names) if self._drop_holder(name, block_id)]

    def clear(self) -> None:
        """Forgets every block."""
        self._first.clear()
        self._more.clear()
        self._held.clear()

    def _add_holder(self, name: BlockHash, block_id: int) -> bool:
        if name not in self._first:
            self._first[name] = block_id
            return True
        self._more.setdefault(name, set()).add(block_id)
        return False

    def _drop_holder(self, name: BlockHash, block_id: int) -> bool:
        others = self._more.get(name)
        if others is None:
            del self._first[name]
            return True
        if self._first[name] == block_id:
            self._first[name] = others.pop()
        else:
            others.remove(block_id)
        if not others:
            del self._more[name]
        return False
