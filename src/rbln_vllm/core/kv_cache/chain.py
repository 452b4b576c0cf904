# SPDX-License-Identifier: Apache-2.0
"""Hashes of a prompt by sub-blocks: the names under which cached KV is found.

Sub-block ``i`` of ``S`` tokens is named by vLLM's own ``hash_block_tokens`` of (name of
sub-block ``i - 1``, its tokens, its extra keys), so a name covers the whole prefix. These are
the hashes vLLM would compute with a block size of S, and a router may recompute them. Extra
keys are vLLM's too: adapter name and path, multimodal content, cache salt, prompt embeddings.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.request import Request

ExtraKeys: TypeAlias = tuple[Any, ...] | None


@dataclass
class HashChain:
    """The names of one request's sub-blocks, as far as they have been asked for.

    ``hashes[i]`` covers tokens ``[0, (i + 1) * S)``; ``extra_keys[i]`` belongs to sub-block i
    alone. ``next_mm_item`` is where vLLM's walk over multimodal items goes on.
    """

    hashes: list[BlockHash] = field(default_factory=list)
    extra_keys: list[ExtraKeys] = field(default_factory=list)
    next_mm_item: int = 0

    def parent(self, index: int) -> BlockHash | None:
        """Returns the name before sub-block ``index``, None before the first."""
        return self.hashes[index - 1] if index else None


@dataclass(frozen=True)
class SubBlockHasher:
    """Computes the names of sub-blocks of ``size`` tokens with ``hash_function``."""

    size: int
    hash_function: Callable[[Any], bytes]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a sub-block has at least 1 token, got {self.size}")

    def extend(self, chain: HashChain, request: Request, count: int) -> None:
        """Makes ``chain`` hold the first ``count`` names of ``request``.

        Raises:
            ValueError: the request has no tokens for that many.
        """
        if count * self.size > request.num_tokens:
            raise ValueError(
                f"{request.request_id} has {request.num_tokens} tokens, fewer than {count} "
                f"sub-blocks of {self.size}"
            )
        while len(chain.hashes) < count:
            self._append(chain, request)

    def _append(self, chain: HashChain, request: Request) -> None:
        start = len(chain.hashes) * self.size
        end = start + self.size
        keys, chain.next_mm_item = generate_block_hash_extra_keys(
            request, start, end, chain.next_mm_item
        )
        keys = canonical(keys)
        parent = chain.parent(len(chain.hashes))
        tokens = request.all_token_ids[start:end]
        chain.hashes.append(hash_block_tokens(self.hash_function, parent, tokens, keys))
        chain.extra_keys.append(keys)


def canonical(keys: ExtraKeys) -> ExtraKeys:
    """Returns ``keys`` with equal strings as one object.

    vLLM's default hash pickles its input, and a pickle says whether two equal strings are the
    same object, which depends on how the request reached the process.
    """
    if keys is None:
        return None
    return tuple(_one_object(key) for key in keys)


def _one_object(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_one_object(part) for part in value)
    return sys.intern(value) if type(value) is str else value
