# SPDX-License-Identifier: Apache-2.0
"""How many of a request's drafts a step takes: what fits the step, and what can still be used."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from rbln_vllm.core.limits import blocks_for


@dataclass(frozen=True)
class RowSlots:
    """The slots of the pool that a row with all its drafts may need."""

    block_size: int
    drafts: int
    lookahead: int

    @property
    def most_blocks(self) -> int:
        return blocks_for(1 + self.drafts + self.lookahead, self.block_size)


def cut_to_step(requests: Sequence[Request], budget: int) -> None:
    """Cuts the drafts of ``requests``, the rows of the next decode step, to what is of use.

    ``budget`` is the most tokens of a step. Upstream would give the first rows all their drafts and
    leave the last out of the step, time and again; here each row has an equal share. Drafts
    beyond ``max_tokens`` would be verified for nothing.
    """
    for request in requests:
        share = budget // len(requests) - 1
        _keep(request, min(share, request.max_tokens - request.num_output_tokens - 1))


def cut_to_pool(requests: Sequence[Request], manager: KVCacheManager, slots: RowSlots) -> None:
    """Cuts the drafts of ``requests`` to the blocks they hold, unless enough are free for all."""
    if manager.block_pool.get_num_free_blocks() >= len(requests) * slots.most_blocks:
        return
    for request in requests:
        held = min(map(len, manager.get_blocks(request.request_id).blocks))
        cut_to_blocks(request, held, slots.block_size, slots.lookahead)


def cut_to_blocks(request: Request, blocks: int, block_size: int, lookahead: int) -> None:
    """Keeps no more drafts than have room in the ``blocks`` that ``request`` holds."""
    _keep(request, blocks * block_size - lookahead - request.num_computed_tokens - 1)


def _keep(request: Request, room: int) -> None:
    if len(request.spec_token_ids) > room:
        request.spec_token_ids = request.spec_token_ids[: max(0, room)]
