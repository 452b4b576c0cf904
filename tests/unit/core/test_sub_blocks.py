# SPDX-License-Identifier: Apache-2.0
"""Prefix hits inside a block: lengths, what keeps entries apart, refusals, tight pools."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from rbln_vllm.core.kv_cache.chain import HashChain, SubBlockHasher, canonical
from rbln_vllm.core.kv_cache.copies import KVCopy
from rbln_vllm.core.scheduler import RBLNAsyncScheduler, RBLNScheduler
from tests.unit.core.cache_driver import CacheDriver, names_of
from tests.unit.core.harness import Driver, SchedulerFactory, make_request, prompt_of

BLOCK, SUB, CHUNK, MAX_LEN = 16, 4, 8, 64
EDGES = sorted(
    {1, SUB - 1, SUB, SUB + 1, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK - 1, BLOCK, BLOCK + 1}
    | {2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, MAX_LEN - 2, MAX_LEN - 1}
)


def driver_of(build: SchedulerFactory, **options: Any) -> CacheDriver:
    defaults = {"block": BLOCK, "sub_block": SUB, "chunk": CHUNK, "max_len": MAX_LEN}
    return CacheDriver(build(prefix=True, events=True, **(defaults | options)))


def run_alone(driver: Driver, request_id: str, prompt: list[int], **options: Any) -> Any:
    request = driver.add(request_id, prompt, **({"max_tokens": 1} | options))
    driver.run()
    driver.check_text(request_id)
    return request


def hit_of(driver: CacheDriver, request_id: str, prompt: list[int], **options: Any) -> int:
    """Runs a request alone and returns the tokens it found cached."""
    run_alone(driver, request_id, prompt, **options)
    return driver.hits[-1]


# -- lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGES)
def test_a_repeated_prompt_hits_all_whole_sub_blocks_but_its_last_token(
    build: SchedulerFactory, length: int
) -> None:
    driver = driver_of(build)
    assert hit_of(driver, "cold", prompt_of(length)) == 0
    assert hit_of(driver, "warm", prompt_of(length)) == SUB * ((length - 1) // SUB)


@pytest.mark.parametrize("shared", EDGES)
def test_a_shared_prefix_hits_its_whole_sub_blocks(build: SchedulerFactory, shared: int) -> None:
    driver = driver_of(build, max_len=2 * MAX_LEN)
    prefix = prompt_of(shared)
    run_alone(driver, "first", [*prefix, *[90] * 9])
    assert hit_of(driver, "second", [*prefix, *[91] * 9]) == SUB * (shared // SUB)


def test_the_published_example(build: SchedulerFactory) -> None:
    """3,000 shared tokens, blocks of 4,096, sub-blocks of 128: 2,944 are found, 56 computed."""
    options: dict[str, Any] = {"block": 4096, "sub_block": 128, "chunk": 128, "max_len": 4096}
    scheduler = build(prefix=True, blocks=9, **options)
    for request_id, own in (("first", 1), ("second", 2)):
        prompt = [*prompt_of(3000), *prompt_of(500, own)]
        scheduler.add_request(make_request(request_id, prompt, block=4096, max_tokens=1))
    runner = Driver(scheduler).runner
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            hit = new.num_computed_tokens
            assert hit == (2944 if new.req_id == "second" else 0)
            copies = output.kv_cache_block_copies
            assert copies is None if hit == 0 else copies == [KVCopy(1, 2, 2944)]
        scheduler.update_from_output(output, runner.execute(output))


def test_whole_blocks_alone_would_find_nothing_there(build: SchedulerFactory) -> None:
    """The same with sub-blocks off: the tests above see what sub-blocks do."""
    scheduler = build(prefix=True, block=BLOCK, chunk=CHUNK, max_len=MAX_LEN)
    driver = Driver(scheduler)
    run_alone(driver, "cold", prompt_of(BLOCK - 1))
    run_alone(driver, "warm", prompt_of(BLOCK - 1))
    assert any(row.startswith("P warm[0:8]") for row in driver.table)


def test_generated_tokens_are_found(build: SchedulerFactory) -> None:
    """All but the last one, whose KV is never computed; also across the end of the prompt."""
    driver = driver_of(build)
    run_alone(driver, "turn 1", prompt_of(10), max_tokens=15)
    history = [*prompt_of(10), *driver.tokens["turn 1"]]
    assert hit_of(driver, "turn 2", [*history, 5, 6, 7]) == 24


def test_a_running_request_lends_what_it_has(build: SchedulerFactory) -> None:
    driver = driver_of(build, max_prefill_run=0)
    driver.add("long", prompt_of(30), max_tokens=12)
    while not driver.tokens["long"]:
        driver.step()
    driver.add("late", prompt_of(30))
    driver.step()
    assert driver.hits[-1] == 28
    driver.run().check_text()


# -- once per request ------------------------------------------------------------------------


def test_hits_are_counted_once_in_tokens(
    build: SchedulerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing a request that is not admitted counts nothing and refreshes nothing."""
    driver = driver_of(build, blocks=6, log_stats=True)
    manager = driver.manager
    run_alone(driver, "cold", prompt_of(30))
    taken: list[PrefixCacheStats] = []
    take = manager.make_prefix_cache_stats

    def take_and_keep() -> PrefixCacheStats | None:
        stats = take()
        assert stats is not None
        taken.append(stats)
        return stats

    monkeypatch.setattr(manager, "make_prefix_cache_stats", take_and_keep)
    blocker = driver.add("blocker", prompt_of(62, 7), max_tokens=1)
    driver.step()
    request = driver.add("warm", prompt_of(30))
    for _ in range(5):
        assert manager.get_computed_blocks(request)[1] in (16, 28)
    driver.run()
    assert sum(stats.requests for stats in taken) == 2
    queries = blocker.num_prompt_tokens + request.num_prompt_tokens
    assert sum(stats.queries for stats in taken) == queries
    assert sum(stats.hits for stats in taken) == driver.hits[-1] > 0


def test_usage_reports_the_cached_tokens(build: SchedulerFactory) -> None:
    driver = driver_of(build)
    run_alone(driver, "cold", prompt_of(30))
    request = driver.add("warm", prompt_of(30), max_tokens=2)
    while request.num_computed_tokens == 0:
        driver.scheduler.schedule()
    assert request.prefill_stats is not None
    assert request.prefill_stats.num_cached_tokens == 28
    assert request.prefill_stats.num_local_cached_tokens == 28


# -- what keeps entries apart ----------------------------------------------------------------


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=3)
    return MultiModalFeatureSpec(None, "image", identifier, place)


EXTRAS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "a"},
    "other salt": {"cache_salt": "b"},
    "adapter": {"lora_request": LoRARequest("one", 1, "/one")},
    "adapter of that name, another version": {"lora_request": LoRARequest("one", 1, "/two")},
    "image": {"mm_features": [image("cat", 1)]},
    "other image": {"mm_features": [image("dog", 1)]},
    "image elsewhere": {"mm_features": [image("cat", 2)]},
    "none": {},
}


def chain_of(tokens: list[int], count: int, size: int = SUB, **options: Any) -> HashChain:
    chain = HashChain()
    request = make_request("r", tokens, block=BLOCK, **options)
    SubBlockHasher(size, sha256).extend(chain, request, count)
    return chain


def test_extra_keys_give_every_sub_block_another_name(build: SchedulerFactory) -> None:
    chains = {name: chain_of(prompt_of(12), 3, **extra) for name, extra in EXTRAS.items()}
    for index in range(3):
        assert len({chain.hashes[index] for chain in chains.values()}) == len(EXTRAS)


@pytest.mark.parametrize("name", ["salt", "other salt", "none"])
def test_extra_keys_are_part_of_the_lookup(build: SchedulerFactory, name: str) -> None:
    driver = driver_of(build)
    salted = driver.add("salted", prompt_of(12), max_tokens=1, cache_salt="a")
    other = make_request("other", prompt_of(12), block=BLOCK, **EXTRAS[name])
    while not salted.is_finished():  # the model of the driver knows no salts
        output = driver.scheduler.schedule()
        driver.scheduler.update_from_output(output, driver.runner.execute(output))
    hit = driver.manager.get_computed_blocks(other)[1]
    assert hit == (8 if name == "salt" else 0)


def test_names_are_those_of_vllm_with_blocks_of_that_size(build: SchedulerFactory) -> None:
    """So a router that hashes as vLLM does needs to know the size only."""
    init_none_hash(sha256)
    for extra in EXTRAS.values():
        request = make_request("r", prompt_of(40), block=SUB, **extra)
        assert chain_of(prompt_of(40), 10, **extra).hashes == request.block_hashes
    assert chain_of(prompt_of(40), 10).hashes == names_of(tuple(prompt_of(40)), SUB)
    assert get_request_block_hasher(SUB, sha256)(request) == []


def test_names_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded in another process, without PYTHONHASHSEED."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(sha256)
    name = chain_of(list(range(8)), 2, cache_salt="s").hashes[1]
    assert name.hex() == "b151908db6c8e5e283040321b265762c8faa34fcce6e7016f85166966b72ef9b"


def test_equal_strings_are_one_object() -> None:
    parts = [("mm", "".join(["c", "at"]), 0), ("mm", "".join(["ca", "t"]), 4)]
    once = canonical((("mm", "cat", 0), ("mm", "cat", 4)))
    assert sha256(tuple(parts)) != sha256((("mm", "cat", 0), ("mm", "cat", 4)))
    assert sha256(canonical(tuple(parts))) == sha256(once)
    assert canonical(None) is None


def test_a_chain_needs_tokens() -> None:
    with pytest.raises(ValueError, match="fewer than 4 sub-blocks"):
        chain_of(prompt_of(15), 4)
    with pytest.raises(ValueError, match="at least 1 token"):
        SubBlockHasher(0, get_hash_fn_by_name("sha256"))


# -- what is not offered ---------------------------------------------------------------------


@pytest.mark.parametrize("sub_block", [SUB, None])
def test_a_refused_step_leaves_nothing_behind(
    build: SchedulerFactory, sub_block: int | None
) -> None:
    """The runner did not write what the scheduler counts as computed."""
    options: dict[str, Any] = {"block": 8, "chunk": 16, "max_len": MAX_LEN, "sub_block": sub_block}
    driver = Driver(build(prefix=True, **options))
    driver.runner.refuse["victim"] = "no program"
    driver.add("victim", prompt_of(16))
    driver.run()
    driver.add("next", prompt_of(17))
    driver.run()
    driver.check_text("next")
    assert any(row.startswith("P next[0:16]") for row in driver.table)


def test_refused_after_a_chunk_keeps_that_chunk(build: SchedulerFactory) -> None:
    driver = driver_of(build)
    driver.add("victim", prompt_of(24))
    driver.step()
    driver.runner.refuse["victim"] = "no program"
    driver.run()
    assert hit_of(driver, "next", prompt_of(24)) == CHUNK


@pytest.mark.parametrize("cls", [RBLNScheduler, RBLNAsyncScheduler])
def test_nothing_in_flight_is_offered(build: SchedulerFactory, cls: type[RBLNScheduler]) -> None:
    """With the output one step late, a hit is what steps that have come back wrote."""
    options: dict[str, Any] = {"block": BLOCK, "sub_block": SUB, "chunk": CHUNK}
    driver = Driver(build(prefix=True, cls=cls, **options), depth=2, may_idle=True)
    manager = driver.scheduler.step_content.sub_blocks
    assert manager is not None
    driver.add("first", prompt_of(24))
    probe = make_request("probe", prompt_of(24), block=BLOCK)
    hits = []
    for _ in range(4):
        driver.step()
        hits.append(manager.get_computed_blocks(probe)[1])
    assert hits == [0, 8, 16, 20]
    manager.free(probe)
    manager._chains.clear()
    driver.run()


@pytest.mark.parametrize("when", range(12))
def test_an_abort_at_any_step_leaves_the_pool_as_it_was(build: SchedulerFactory, when: int) -> None:
    """Hits, chunks and decodes, in flight and between steps; the driver checks every step."""
    for in_flight in (True, False):
        driver = driver_of(build, blocks=8)
        run_alone(driver, "cold", prompt_of(30))
        driver.add("victim", [*prompt_of(22), *prompt_of(20, 3)], max_tokens=5)
        for _ in range(when):
            driver.step()
        alive = "victim" in driver.scheduler.requests
        if in_flight and alive:
            driver.step(abort_in_flight=["victim"])
        elif alive:
            driver.abort("victim")
        driver.run()
        assert hit_of(driver, "after", prompt_of(30)) > 0


def test_a_whole_pool_is_not_kept_from_a_request_by_its_own_source(
    build: SchedulerFactory,
) -> None:
    """4 blocks, all needed: the copy's source cannot stay beside them, so it is not used."""
    driver = driver_of(build, blocks=5)
    run_alone(driver, "cold", prompt_of(62))
    assert hit_of(driver, "warm", prompt_of(62)) == 48
    assert driver.shortened == 1


def test_rejected_drafts_are_not_offered(build: SchedulerFactory) -> None:
    """What a step computed beyond the accepted tokens is not what the tokens say."""
    driver = driver_of(build)
    request = driver.add("r", prompt_of(7), max_tokens=20)
    driver.step()
    assert driver.manager.index.count(1) == 1
    request.num_computed_tokens += 3  # as scheduled with three drafts ...
    request.num_in_flight_tokens += 3
    driver.manager.commit(request)
    assert driver.manager.index.count(1) == 1
    request.num_computed_tokens -= 3  # ... and come back with all of them rejected
    request.num_in_flight_tokens -= 3
    driver.manager.commit(request)
    assert driver.manager.index.count(1) == 1
    driver.run()


# -- beside a connector ----------------------------------------------------------------------


class Connector:
    """A store that holds ``tokens`` beyond what is local, as the scheduler sees it."""

    supports_divergent_local_hybrid_hits = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[int] = []

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        self.asked.append(local)
        return self.tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        self.loaded = num_external

    def build_connector_meta(self, output: Any) -> None:
        """Nothing for the worker."""


@pytest.mark.parametrize("external", [0, SUB, 12, 13, BLOCK])
def test_the_longer_of_copy_and_load_wins(build: SchedulerFactory, external: int) -> None:
    """16 + 12 tokens are here, 16 + ``external`` in a store; at a tie nothing is loaded."""
    driver = driver_of(build)
    run_alone(driver, "cold", prompt_of(30))
    scheduler = driver.scheduler
    driver.add("warm", prompt_of(34))
    scheduler.connector = Connector(external)
    output = scheduler.schedule()
    assert scheduler.connector.asked == [BLOCK]
    loaded = external > 12
    assert scheduler.connector.loaded == (external if loaded else 0)
    assert output.scheduled_new_reqs[0].num_computed_tokens == BLOCK + max(external, 12)
    copies = output.kv_cache_block_copies
    assert copies is None if loaded else [copy.num_tokens for copy in copies] == [12]


def test_a_load_under_way_is_not_offered(build: SchedulerFactory) -> None:
    """Not while it runs, and not by the abort of its request; but when it has come."""
    manager = driver_of(build).manager
    probe = make_request("probe", prompt_of(30), block=BLOCK)
    for arrives in (False, True):
        request = make_request("loads", prompt_of(30), block=BLOCK)
        manager.allocate_slots(request, 0, num_external_computed_tokens=29, delay_cache_blocks=True)
        request.num_computed_tokens = 29
        manager.commit(request)
        assert manager.get_computed_blocks(probe)[1] == 0
        if arrives:
            manager.cache_blocks(request, 29)
        manager.free(request)
        assert manager.get_computed_blocks(probe)[1] == (28 if arrives else 0)


def test_a_failed_load_is_taken_back(build: SchedulerFactory) -> None:
    manager = driver_of(build).manager
    request = make_request("r", prompt_of(30), block=BLOCK)
    manager.allocate_slots(request, 30)
    request.num_computed_tokens = 29
    manager.commit(request)
    manager.evict_blocks({2})
    request.num_computed_tokens = BLOCK  # the second block turned out to be bad
    manager.commit(request)
    probe = make_request("probe", prompt_of(30), block=BLOCK)
    assert manager.get_computed_blocks(probe)[1] == BLOCK
    request.num_computed_tokens = 24  # computed again
    manager.commit(request)
    assert manager.get_computed_blocks(probe)[1] == 24


def test_a_request_resumed_beside_a_connector_takes_whole_blocks(build: SchedulerFactory) -> None:
    driver = driver_of(build)
    run_alone(driver, "cold", prompt_of(30))
    settings = driver.manager._settings
    driver.manager._settings = replace(settings, has_connector=True)
    probe = make_request("probe", prompt_of(30), block=BLOCK)
    assert driver.manager.get_computed_blocks(probe)[1] == 28
    probe.num_preemptions = 1
    assert driver.manager.get_computed_blocks(probe)[1] == BLOCK


# -- other layers ----------------------------------------------------------------------------


def test_sliding_windows_are_hit_inside_a_block(build: SchedulerFactory) -> None:
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=BLOCK
    )
    scheduler = build(
        prefix=True, block=BLOCK, sub_block=SUB, chunk=CHUNK, max_len=MAX_LEN, spec=spec
    )
    manager = scheduler.step_content.sub_blocks
    assert manager is not None
    first = make_request("first", prompt_of(40), block=BLOCK, max_tokens=1)
    scheduler.add_request(first)
    second = make_request("second", prompt_of(40), block=BLOCK, max_tokens=1)
    assert manager.get_computed_blocks(second)[1] == 0
    granted = manager.allocate_slots(first, 40, num_new_computed_tokens=0)
    assert granted is not None
    first.num_computed_tokens = 40
    manager.commit(first)
    assert manager.get_computed_blocks(second)[1] == 36


def test_a_recurrent_state_has_no_sub_blocks(build: SchedulerFactory) -> None:
    spec = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="MambaSpec, which has no sub-blocks"):
        build(prefix=True, block=BLOCK, sub_block=SUB, chunk=CHUNK, spec=spec)
