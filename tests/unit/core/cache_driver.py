# SPDX-License-Identifier: Apache-2.0
"""A brute-force model of the cached KV, a mirror made of events, and a driver that compares.

:class:`CachedContent` learns from what the runner was told and knows no hashes: it keeps, for
every block, all tokens up to the last one written there, and finds prefixes by comparing tokens.
:class:`EventMirror` learns from published events alone. After every step both must agree with
the scheduler, and before a step both must foretell its prefix hits.
"""

import hashlib
import pickle
from collections.abc import Collection, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.output import SchedulerOutput

from rbln_vllm.core.kv_cache.manager import SubBlockKVCacheManager
from rbln_vllm.core.scheduler import RBLNScheduler
from tests.unit.core.fake_runner import NULL_BLOCK, FakeRunner
from tests.unit.core.harness import Driver

Tokens = tuple[int, ...]


def names_of(tokens: Tokens, size: int) -> list[bytes]:
    """The names of all sub-blocks of ``tokens``, computed apart from the code under test."""
    names: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        parent = names[-1] if names else kv_cache_utils.NONE_HASH
        text = pickle.dumps((parent, tokens[end - size : end], None), pickle.HIGHEST_PROTOCOL)
        names.append(hashlib.sha256(text).digest())
    return names


class CachedContent:
    """Block id to all tokens of the prompt up to the last one the block holds."""

    def __init__(self, block: int, sub_block: int) -> None:
        self.block, self.sub_block = block, sub_block
        self.tokens: dict[int, Tokens] = {}
        self._evicted: set[tuple[str, int]] = set()

    def hit(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The longest hit by whole blocks and the longest by sub-blocks, in tokens."""
        whole = 0
        while whole + self.block < len(prompt) and self._held(prompt[: whole + self.block]):
            whole += self.block
        best, length = whole, whole + self.sub_block
        while length < min(len(prompt), whole + self.block) and self._held(prompt[:length]):
            best, length = length, length + self.sub_block
        return whole, best

    def _held(self, prefix: Sequence[int]) -> bool:
        want, start = tuple(prefix), (len(prefix) - 1) // self.block * self.block
        return any(t[: len(want)] == want for b, t in self.tokens.items() if self.start(b) == start)

    def start(self, block_id: int) -> int:
        """The position of the block's first slot in its prompt."""
        return (len(self.tokens[block_id]) - 1) // self.block * self.block

    def count(self, block_id: int) -> int:
        """The whole sub-blocks a block holds."""
        if block_id not in self.tokens:
            return 0
        return (len(self.tokens[block_id]) - self.start(block_id)) // self.sub_block

    def names(self, block_id: int) -> list[bytes]:
        """The names of the sub-blocks a block holds."""
        first = self.start(block_id) // self.sub_block
        return names_of(self.tokens[block_id], self.sub_block)[first:]

    def run(self, output: SchedulerOutput, runner: FakeRunner, lost: Collection[str]) -> None:
        """Follows a step; what it wrote for the requests in ``lost`` does not count."""
        for block_id in runner.granted:
            self.tokens.pop(block_id, None)
        for request_id, count in output.num_scheduled_tokens.items():
            if request_id not in lost:
                row = runner.rows[request_id]
                start = runner._start(output, request_id)
                # A copy becomes findable with the first step of the request that owns it.
                for position in range(start // self.block * self.block, start + count):
                    self.tokens[row.table[position // self.block]] = tuple(
                        row.tokens[: position + 1]
                    )


class EventMirror:
    """What a router knows. A consumer of ``KVEventBatch``, in place of the publisher."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parents: dict[Any, Any] = {}
        self._children: dict[tuple[Any, Tokens], Any] = {}
        self._announced: set[Any] = {None}

    def publish(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.parents[name]  # KeyError: removed twice
            else:
                assert isinstance(event, AllBlocksCleared)
                self.parents.clear()
                self._announced = {None}

    def shutdown(self) -> None:
        """Part of the publisher's interface."""

    def _store(self, event: BlockStored) -> None:
        (name,) = event.block_hashes
        assert name not in self.parents, "stored twice"
        assert event.parent_block_hash in self._announced, "a child before its parent"
        assert event.block_size == self.size == len(event.token_ids)
        self.parents[name] = event.parent_block_hash
        self._children[event.parent_block_hash, tuple(event.token_ids)] = name
        self._announced.add(name)

    def hit(self, prompt: Sequence[int]) -> int:
        """The hit it foretells for ``prompt``, in tokens."""
        name, length = None, 0
        while length + self.size < len(prompt):
            step = tuple(prompt[length : length + self.size])
            name = self._children.get((name, step))
            if name not in self.parents:
                break
            length += self.size
        return length


class CacheDriver(Driver):
    """Checks every step of a scheduler with sub-blocks against the model and the mirror."""

    def __init__(self, scheduler: RBLNScheduler, **options: Any) -> None:
        super().__init__(scheduler, **options)
        manager = scheduler.step_content.sub_blocks
        assert isinstance(manager, SubBlockKVCacheManager)
        self.manager, self.pool = manager, manager.block_pool
        self.content = CachedContent(manager.block_size, manager.sub_block_size)
        self.mirror = EventMirror(manager.sub_block_size)
        scheduler.kv_event_publisher.shutdown()
        scheduler.kv_event_publisher = self.mirror
        self.hits: list[int] = []
        self.copies = self.shortened = 0
        self._tick = 0
        self._freed_at: dict[int, int] = {}

    def reset(self) -> bool:
        """Resets the prefix cache as a user does."""
        done = bool(self.scheduler.reset_prefix_cache())
        if done:
            self.content.tokens.clear()
        return done

    def evict(self, block_ids: set[int]) -> None:
        """Evicts blocks as a connector does whose load failed."""
        self.manager.evict_blocks(block_ids)
        for block_id in block_ids:
            self.content.tokens.pop(block_id, None)

    def _before_step(self) -> None:
        self._tick += 1
        self._free_before = self.free_blocks
        # What an abort or a reset between steps has caused is published with the next step.
        self.mirror.publish(KVEventBatch(ts=0.0, events=self.manager.take_events()))

    def _after_run(self, output: SchedulerOutput, dying: frozenset[str]) -> None:
        for request_id, hit in self._admitted(output).items():
            self._check_hit(self._known_tokens(request_id, output), hit)
        self._check_sources(output)
        self._check_evicted_in_order()
        self._note_freed()  # a source is in use now and may be free again when the step ends
        refused = self.runner.refuse.keys() & output.num_scheduled_tokens.keys()
        self.content.run(output, self.runner, dying | refused)

    def _after_step(self) -> None:
        self._note_freed()
        self.check_every_block_has_one_state()
        self.check_padding_is_untouched()
        self.check_index_is_the_content()
        self.check_mirror_is_the_index()

    def _admitted(self, output: SchedulerOutput) -> dict[str, int]:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                starts[request_id] = start
        return starts

    def _known_tokens(self, request_id: str, output: SchedulerOutput) -> Tokens:
        """What the scheduler knew: the runner has appended what it sampled since."""
        end = self.runner._start(output, request_id) + output.num_scheduled_tokens[request_id]
        tokens = self.runner.rows[request_id].tokens
        return tuple(tokens[:-1] if end == len(tokens) - 1 else tokens)

    def _check_hit(self, tokens: Tokens, hit: int) -> None:
        """A hit is the longest there is, unless the copy has no room beside the request."""
        whole, best = self.content.hit(tokens)
        assert self.mirror.hit(tokens) == best
        self.hits.append(hit)
        if hit != best:
            assert hit == whole
            needed = -(-len(tokens) // self.content.block) + 1
            slack = self.scheduler.kv_cache_manager.watermark_blocks
            assert needed + slack > self._free_before, "a shorter hit than the pool allows"
            self.shortened += 1

    def _check_sources(self, output: SchedulerOutput) -> None:
        copies = output.kv_cache_block_copies or ()
        self.copies += len(copies)
        for source, destination, length in copies:
            assert source not in self.runner.granted, "a source is evicted before it is copied"
            assert destination in self.runner.granted
            assert length <= self.content.count(source) * self.content.sub_block
            assert self.pool.blocks[source].ref_cnt > 0
            assert self.pool.blocks[destination].ref_cnt == 2

    def _check_evicted_in_order(self) -> None:
        """What was granted had been free for at least as long as what is cached and still free."""
        waiting = [
            self._freed_at[block.block_id]
            for block in self.pool.blocks
            if block.block_id in self._freed_at
            and block.ref_cnt == 0
            and self.content.count(block.block_id)
            and block.block_id not in self.runner.granted
        ]
        for block_id in self.runner.granted:
            if self.content.count(block_id) and waiting and block_id in self._freed_at:
                assert self._freed_at[block_id] <= min(waiting), "not the least recently used"

    def _note_freed(self) -> None:
        for block in self.pool.blocks:
            if block.ref_cnt:
                self._freed_at.pop(block.block_id, None)
            else:
                self._freed_at.setdefault(block.block_id, self._tick)

    def check_every_block_has_one_state(self) -> None:
        """A block is in the free queue once and unreferenced, or referenced and not there."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        used = [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        assert len(free) == self.free_blocks
        assert sorted([*free, *used]) == list(range(1, self.pool.num_gpu_blocks))

    def check_padding_is_untouched(self) -> None:
        """Block 0 holds nothing and was never granted."""
        assert self.manager.index.count(NULL_BLOCK) == 0
        assert self.pool.blocks[NULL_BLOCK].block_hash is None
        assert not any(block_id == NULL_BLOCK for block_id, _ in self.runner.kv)

    def check_index_is_the_content(self) -> None:
        """The index holds exactly the whole sub-blocks that were written and not evicted."""
        whole = self.pool.cached_block_hash_to_block
        for block in self.pool.blocks:
            count = self.content.count(block.block_id)
            want = self.content.names(block.block_id) if count else []
            assert list(self.manager.index.held(block.block_id)) == want, block
            if count == self.content.block // self.content.sub_block:
                assert whole.contain(block.block_hash, block.block_id)
            assert (block.block_hash is None) == (count == 0)

    def check_mirror_is_the_index(self) -> None:
        """The events say what is held."""
        held = {name for b in self.pool.blocks for name in self.manager.index.held(b.block_id)}
        assert set(self.mirror.parents) == {maybe_convert_block_hash(name) for name in held}
        assert len(self.manager.index) == len(held)
