# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager with prefix hits that end inside a block.

vLLM finds the whole blocks of a prefix. From there on this manager walks the sub-blocks of the
next block, hands the block that holds them to vLLM as a *partial hit*, and vLLM does the rest:
it takes a private block, redirects the request to it and orders a copy. What differs:

* Content is offered for hits when the step that writes it has come back, not when it is
  scheduled. So a copy never reads what is not written, a step the runner refused leaves nothing
  behind, and drafts count only once they are accepted.
* Sources and destinations of copies stay referenced until the step that copies has come back.
* Partly filled blocks, of running and of finished requests, can be hit until they are evicted.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rbln_vllm.core.kv_cache.chain import HashChain, SubBlockHasher
from rbln_vllm.core.kv_cache.copies_in_flight import CopiesInFlight
from rbln_vllm.core.kv_cache.events import GROUP, SubBlockEvents
from rbln_vllm.core.kv_cache.index import SubBlockIndex
from rbln_vllm.core.kv_cache.residency import ResidencyObserver


@dataclass(frozen=True)
class SubBlockSettings:
    """What the manager needs besides vLLM's arguments.

    ``lookahead`` is the number of slots the scheduler asks for beyond a request's tokens.
    """

    hasher: SubBlockHasher
    lookahead: int = 0
    has_connector: bool = False


class SubBlockKVCacheManager(KVCacheManager):
    """Hits of ``S * floor((L - 1) / S)`` tokens for a prompt of L tokens that was seen before.

    All layers share one group of blocks. Takes vLLM's arguments by name.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        settings: SubBlockSettings,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
        **options: Any,
    ) -> None:
        self._settings, self._hasher = settings, settings.hasher
        self.sub_block_size = settings.hasher.size
        self.index = SubBlockIndex()
        observer = ResidencyObserver(self._lost, self._reset, metrics_collector)
        super().__init__(
            kv_cache_config, enable_kv_cache_events=False, metrics_collector=observer, **options
        )
        (self._group,) = self.coordinator.single_type_managers
        self.block_size = int(self._group.block_size)
        if not self.enable_caching or self.block_size % self.sub_block_size:
            raise ValueError("sub-blocks need prefix caching and must divide the block")
        self._per_block = self.block_size // self.sub_block_size
        kind, window = self.kv_cache_event_metadata[GROUP]
        self.events = (
            SubBlockEvents(self.sub_block_size, kind, window) if enable_kv_cache_events else None
        )
        self._chains: dict[str, HashChain] = {}
        # Sub-blocks of each running request that have been indexed.
        self._committed: dict[str, int] = {}
        # Requests whose blocks hold, for now or for good, not what their tokens say: a load or
        # a copy into them is under way; a step of theirs was refused.
        self._loading: set[str] = set()
        self._distrusted: set[str] = set()
        self._copying = CopiesInFlight()

    # -- finding -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Returns vLLM's hit, extended into the next block as far as sub-blocks match."""
        blocks, num_tokens, boundary = super().get_computed_blocks(request)
        if not self._may_extend(request):
            return blocks, num_tokens, boundary
        count = self._count_matching(request, num_tokens)
        if count:
            source = self._source(request, num_tokens // self.sub_block_size + count - 1)
            extended = KVCacheBlocks(([*blocks.blocks[GROUP], source],))
            hit = num_tokens + count * self.sub_block_size
            if self._affords(request, extended, hit, source):
                return extended, hit, boundary
        return blocks, num_tokens, boundary

    def _may_extend(self, request: Request) -> bool:
        resumed_beside_connector = self._settings.has_connector and request.num_preemptions > 0
        return self.prefix_cache_lookup_enabled(request) and not resumed_beside_connector

    def _count_matching(self, request: Request, num_tokens: int) -> int:
        """Returns how many sub-blocks after ``num_tokens`` tokens, whole blocks, are held.

        At least one token is left to compute. Drafters that read one token ahead (EAGLE) have
        the last matching sub-block computed again.
        """
        drop = 1 if self.use_eagle else 0
        start = num_tokens // self.sub_block_size
        usable = int(request.num_tokens - 1 + drop) // self.sub_block_size - start
        limit = min(self._per_block - 1 + drop, usable)
        chain = self._chains.setdefault(request.request_id, HashChain())
        for count in range(limit):
            self._hasher.extend(chain, request, start + count + 1)
            if chain.hashes[start + count] not in self.index:
                return max(count - drop, 0)
        return max(limit - drop, 0)

    def _source(self, request: Request, index: int) -> KVCacheBlock:
        """Returns a block that holds sub-block ``index``; one in use costs no free block."""
        name = self._chains[request.request_id].hashes[index]
        holders = (self.block_pool.blocks[block_id] for block_id in self.index.holders(name))
        first = next(holders)
        return next((block for block in (first, *holders) if block.ref_cnt), first)

    def _affords(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int, source: KVCacheBlock
    ) -> bool:
        """Whether the request fits beside a source that nobody else keeps.

        Such a source takes one block more until it is copied. A request that needs the whole
        pool would wait for that block for ever.
        """
        if source.ref_cnt:
            return True
        length = min(request.num_tokens + self._settings.lookahead, self.max_model_len)
        needed = self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=length,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_tokens,
            num_local_computed_tokens=num_tokens,
            num_tokens_main_model=length,
            apply_admission_cap=True,
        )
        return bool(needed + self.watermark_blocks <= self.block_pool.get_num_free_blocks())

    # -- granting and copying ----------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **options: Any
    ) -> KVCacheBlocks | None:
        """Grants as vLLM does, but offers nothing for hits yet; see :meth:`commit`."""
        loads = bool(options.get("delay_cache_blocks", False))
        options["delay_cache_blocks"] = True
        granted = super().allocate_slots(request, num_new_tokens, *args, **options)
        if granted is not None:
            hit_blocks = options.get("new_computed_blocks")
            if hit_blocks is not None and hit_blocks.blocks[GROUP]:
                self._admit(request, int(options["num_new_computed_tokens"]))
            if loads:
                self._loading.add(request.request_id)
        return granted

    def _admit(self, request: Request, hit: int) -> None:
        tail = hit % self.block_size
        if tail:
            self._copying.order(request.request_id, tail)
            self._loading.add(request.request_id)
        if self.events is not None and request.kv_cache_report_mode == "full":
            chain = self._chains[request.request_id]
            self._hasher.extend(chain, request, hit // self.sub_block_size)
            for index in range(hit // self.sub_block_size):
                self.events.stored(request, chain, index)

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """Returns the copies to run before the step; their blocks stay referenced here."""
        pairs = self._group.take_pending_cow_copies()
        return (self._copying.take(pairs) if pairs else []), []

    def release_copied(self) -> None:
        """Lets go of the blocks of the oldest step with copies, which has come back."""
        step = self._copying.pop_oldest()
        self.block_pool.free_blocks(step.blocks)
        self._loading.difference_update(step.request_ids)

    # -- indexing ----------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Offers for hits what the steps that have come back wrote for ``request``.

        Called for every row of every step: it costs a comparison unless a sub-block is full.
        """
        # Accepted drafts behind the token that a request stops at are computed, but not its own.
        written = min(
            request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens
        )
        count = written // self.sub_block_size
        done = self._committed.get(request.request_id, 0)
        if count > done:
            self._commit(request, done, count)
        elif count < done:  # a failed load was taken back
            self._committed[request.request_id] = max(count, 0)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """vLLM's call when a connector has loaded a request, or its output has come back."""
        self._loading.discard(request.request_id)
        self.commit(request)

    def _commit(self, request: Request, done: int, count: int) -> None:
        blocks = self._group.req_to_blocks.get(request.request_id)
        if not blocks or request.request_id in self._distrusted | self._loading:
            return
        num_tokens = count * self.sub_block_size
        chain = self._chains.setdefault(request.request_id, HashChain())
        self._hasher.extend(chain, request, count)
        self._committed[request.request_id] = count
        if num_tokens // self.block_size > self._group.num_cached_block.get(request.request_id, 0):
            self.coordinator.cache_blocks(request, num_tokens)
        for position in range(done // self._per_block, -(-count // self._per_block)):
            if not blocks[position].is_null:
                self._index_block(request, chain, blocks[position], position, count)

    def _index_block(
        self, request: Request, chain: HashChain, block: KVCacheBlock, position: int, count: int
    ) -> None:
        first = position * self._per_block
        start = first + self.index.count(block.block_id)
        end = min(count, first + self._per_block)
        if start >= end:
            return
        new = self.index.add(block.block_id, chain.hashes[start:end])
        if self.events is not None:
            for offset in new:
                self.events.stored(request, chain, start + offset)
        if end < first + self._per_block:
            # vLLM keeps blocks that have a hash in least-recently-used order, and hands out
            # those without first. A full block gets vLLM's own hash.
            block.reset_hash()
            name = make_block_hash_with_group_id(chain.hashes[end - 1], GROUP)
            block.set_block_hash(name, num_tokens=end * self.sub_block_size)

    def distrust(self, request_id: str) -> None:
        """Never again offers blocks of this request: a step of it did not run."""
        self._distrusted.add(request_id)

    def estimate_cached_tokens(self, request: Request) -> int:
        """Returns how many tokens of the request can be hit now."""
        self.commit(request)
        return self._committed.get(request.request_id, 0) * self.sub_block_size

    # -- letting go --------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Frees the request's blocks; what it wrote stays until it is evicted."""
        self.commit(request)
        super().free(request)
        self._forget(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Returns the request's blocks for the caller to free."""
        self.commit(request)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        self._forget(request)
        return blocks

    def _forget(self, request: Request) -> None:
        self._committed.pop(request.request_id, None)
        self._loading.discard(request.request_id)
        if request.is_finished():
            self._chains.pop(request.request_id, None)
            self._distrusted.discard(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False while a request holds blocks.

        Copies in flight do not stand in the way: steps run in order, so they read their sources
        before any later step can write there. Only a connector writes out of order.
        """
        if not self._settings.has_connector:
            for step in self._copying:
                self.block_pool.free_blocks(step.blocks)
                step.blocks.clear()
        return bool(super().reset_prefix_cache())

    def _lost(self, block_id: int) -> None:
        names = self.index.drop(block_id)
        if self.events is not None:
            self.events.removed(names)

    def _reset(self) -> None:
        self.index.clear()
        if self.events is not None:
            self.events.cleared()

    def take_events(self) -> list[KVCacheEvent]:
        """Returns the events since they were last taken."""
        return [] if self.events is None else self.events.take()
