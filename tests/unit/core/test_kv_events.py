# SPDX-License-Identifier: Apache-2.0
"""Events as a router reads them, by sub-blocks and by whole blocks, and the index behind them."""

import random
from collections import Counter
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash, maybe_convert_block_hash

from rbln_vllm.core.kv_cache.index import SubBlockIndex
from tests.unit.core.cache_driver import CacheDriver
from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of
from tests.unit.core.test_sub_block_traffic import random_options, traffic


class Recorder:
    """Takes the place of the publisher."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        """Part of the publisher's interface."""


def record(driver: Driver) -> list[Any]:
    recorder = Recorder()
    driver.scheduler.kv_event_publisher = recorder
    return recorder.events


def test_a_prompt_in_events(build: SchedulerFactory) -> None:
    driver = Driver(build(prefix=True, events=True, block=8, sub_block=4, chunk=16))
    events = record(driver)
    driver.add("r", prompt_of(13), max_tokens=1)
    driver.run()
    assert [type(event) for event in events] == [BlockStored] * 3
    assert [event.parent_block_hash for event in events] == [
        None,
        *(event.block_hashes[0] for event in events[:2]),
    ]
    assert [event.token_ids for event in events] == [
        prompt_of(13)[start : start + 4] for start in (0, 4, 8)
    ]
    kinds = {(e.block_size, e.medium, e.group_idx, e.kv_cache_spec_kind) for e in events}
    assert kinds == {(4, "GPU", 0, "full_attention")}


def test_a_step_publishes_what_it_wrote(build: SchedulerFactory) -> None:
    """Not with the next step, which may be hours away."""
    driver = Driver(build(prefix=True, events=True, block=8, sub_block=4, chunk=8))
    events = record(driver)
    driver.add("r", prompt_of(20), max_tokens=1)
    for want in (2, 4, 5):
        driver.step()
        assert len(events) == want


def test_a_reset_is_announced_once(build: SchedulerFactory) -> None:
    driver = Driver(build(prefix=True, events=True, block=8, sub_block=4, chunk=16))
    events = record(driver)
    driver.add("r", prompt_of(13), max_tokens=1)
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    driver.add("s", prompt_of(4), max_tokens=1)
    driver.run()
    kinds = [type(event) for event in events]
    assert kinds == [*[BlockStored] * 3, AllBlocksCleared, BlockStored]


def test_an_eviction_removes_children_first(build: SchedulerFactory) -> None:
    driver = Driver(build(prefix=True, events=True, block=8, sub_block=4, chunk=16, blocks=5))
    events = record(driver)
    driver.add("r", prompt_of(16), max_tokens=1)
    driver.run()
    stored = [event.block_hashes[0] for event in events]
    driver.add("s", prompt_of(32, 1), max_tokens=1)
    driver.run()
    removed = [h for e in events if isinstance(e, BlockRemoved) for h in e.block_hashes]
    assert removed == stored[::-1]


def test_a_request_may_ask_for_a_full_report(build: SchedulerFactory) -> None:
    """vLLM's ``kv_cache_report_mode``: a hit is announced again, for a router that came late."""
    driver = Driver(build(prefix=True, events=True, block=8, sub_block=4, chunk=16))
    for request_id in ("cold", "warm"):
        driver.add(request_id, prompt_of(13), max_tokens=1)
        driver.run()
    events = record(driver)
    request = driver.add("full", prompt_of(13), max_tokens=1)
    request.kv_cache_report_mode = "full"
    driver.run()
    assert [event.token_ids for event in events] == [
        prompt_of(13)[start : start + 4] for start in (0, 4, 8)
    ]


class BlockMirror:
    """What upstream's events say of whole blocks; it announces every holder."""

    def __init__(self) -> None:
        self.holders: Counter[Any] = Counter()

    def publish(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.holders.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.holders.subtract(event.block_hashes)
            else:
                self.holders.clear()
        assert min(self.holders.values(), default=0) >= 0

    def shutdown(self) -> None:
        """Part of the publisher's interface."""

    def held(self) -> set[Any]:
        return {name for name, count in self.holders.items() if count}


class BlockDriver(Driver):
    """Compares the mirror with the pool after every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mirror = BlockMirror()
        self.scheduler.kv_event_publisher = self.mirror

    def _after_step(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        self.mirror.publish(KVEventBatch(ts=0.0, events=pool.take_events()))
        names = {get_block_hash(b.block_hash) for b in pool.blocks if b.block_hash is not None}
        assert self.mirror.held() == {maybe_convert_block_hash(name) for name in names}


@pytest.mark.parametrize("seed", range(40))
def test_whole_blocks_are_mirrored(build: SchedulerFactory, seed: int) -> None:
    rng = random.Random(9000 + seed)
    driver = BlockDriver(build(**(random_options(rng) | {"sub_block": None})))
    ended = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - ended))


def test_the_mirror_foretells_hits_that_share_some_granules(build: SchedulerFactory) -> None:
    """One, two and three of four sub-blocks in common; the driver compares each hit."""
    driver = CacheDriver(
        build(prefix=True, events=True, block=16, sub_block=4, chunk=8, max_len=64)
    )
    driver.add("first", prompt_of(17), max_tokens=1)
    driver.run()
    for shared in (4, 8, 12, 16):
        prompt = [*prompt_of(shared), *prompt_of(9, 50 + shared)]
        assert driver.mirror.hit(prompt) == shared
        driver.add(f"shares {shared}", prompt, max_tokens=1)
        driver.run()
        assert driver.hits[-1] == shared


# -- the index -------------------------------------------------------------------------------


def name(value: int) -> BlockHash:
    return BlockHash(value.to_bytes(4, "big"))


@pytest.mark.parametrize("seed", range(30))
def test_the_index_is_two_dictionaries(seed: int) -> None:
    """Against sets: first holders and last holders are reported, and nothing else."""
    rng = random.Random(seed)
    index, held = SubBlockIndex(), dict[int, list[BlockHash]]()
    for _ in range(200):
        block = rng.randrange(6)
        before = {n for names in held.values() for n in names}
        if rng.random() < 0.6:
            first = len(held.get(block, ()))
            names = [name(10 * (block // 3) + first + i) for i in range(rng.randrange(1, 3))]
            new = index.add(block, names)
            held.setdefault(block, []).extend(names)
            assert [names[i] for i in new] == [n for n in names if n not in before]
        elif rng.random() < 0.9:
            gone = held.pop(block, [])
            after = {n for names in held.values() for n in names}
            assert index.drop(block) == [n for n in reversed(gone) if n not in after]
        else:
            index.clear()
            held.clear()
        for block_id in range(6):
            assert list(index.held(block_id)) == held.get(block_id, [])
            assert index.count(block_id) == len(held.get(block_id, []))
        for value in range(30):
            holders = {b for b, names in held.items() if name(value) in names}
            assert sorted(index.holders(name(value))) == sorted(holders)
            assert (name(value) in index) == bool(holders)
