# SPDX-License-Identifier: Apache-2.0
"""Keys of chunks, the same in every process whatever ``PYTHONHASHSEED`` is."""

from lmcache.v1.token_database import ChunkedTokenDatabase

_FIRST_HASH = 0x52424C4E4B5631  # any constant; upstream takes one from PYTHONHASHSEED


class StableTokenDatabase(ChunkedTokenDatabase):
    """LMCache's own chunking and hashing, started from a constant."""

    def _get_init_hash(self) -> int:
        return _FIRST_HASH
