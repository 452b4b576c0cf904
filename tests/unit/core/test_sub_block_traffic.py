# SPDX-License-Identifier: Apache-2.0
"""Random traffic over sub-blocks; what must hold is checked by the driver at every step."""

import random
from typing import Any

import pytest

from rbln_vllm.core.limits import blocks_for
from rbln_vllm.core.scheduler import RBLNAsyncScheduler, RBLNScheduler
from tests.unit.core.cache_driver import CacheDriver
from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of

MAX_LEN = 48
GRAINS = [(4, 1), (4, 2), (8, 2), (8, 4), (16, 2), (16, 4), (16, 8), (32, 8)]


def random_options(rng: random.Random) -> dict[str, Any]:
    block, sub_block = rng.choice(GRAINS)
    return {
        "block": block,
        "sub_block": sub_block,
        "chunk": rng.choice([8, 12, 16]),
        "seqs": rng.choice([1, 2, 5, 8]),
        "blocks": blocks_for(MAX_LEN, block) + rng.choice([0, 1, 3, 9, 30]),
        "max_len": MAX_LEN,
        "prefix": True,
        "events": True,
        "policy": rng.choice(["fcfs", "priority"]),
        "max_prefill_run": rng.choice([0, 1, 2]),
        "watermark": rng.choice([0.0, 0.0, 0.15]),
        "steps": rng.choice([1, 1, 2, 5]),
    }


def random_prompt(rng: random.Random) -> list[int]:
    """A few prefixes, each cut anywhere and sometimes continued in an own way."""
    prompt = prompt_of(rng.randrange(1, MAX_LEN), rng.randrange(3))
    own = prompt_of(rng.randrange(1, 12), 1000 + rng.randrange(4))
    return (prompt + own)[: MAX_LEN - 1] if rng.random() < 0.5 else prompt


def traffic(driver: Driver, rng: random.Random, requests: int = 16) -> set[str]:
    """Requests at random times; some are aborted or refused. Returns those."""
    ended: set[str] = set()
    for i in range(requests):
        priority, arrival = rng.randrange(3), float(i // 2)
        options = {"priority": priority, "arrival_time": arrival}
        driver.add(f"r{i}", random_prompt(rng), max_tokens=rng.randrange(1, 16), **options)
        for _ in range(rng.choice([0, 0, 1, 2, 9])):
            ended |= disturbed_step(driver, rng, f"r{rng.randrange(i + 1)}")
    return ended


def disturbed_step(driver: Driver, rng: random.Random, victim: str) -> set[str]:
    alive = victim in driver.scheduler.requests
    fate = rng.random()
    if alive and fate < 0.04:
        driver.abort(victim)
    elif alive and fate < 0.08:
        driver.runner.refuse[victim] = "no program"
    driver.step(abort_in_flight=[victim] if alive and 0.08 <= fate < 0.12 else [])
    disturb_cache(driver, rng)
    return {victim} if alive and fate < 0.12 else set()


def disturb_cache(driver: Driver, rng: random.Random) -> None:
    if isinstance(driver, CacheDriver) and rng.random() < 0.05:
        driver.reset()
    if isinstance(driver, CacheDriver) and rng.random() < 0.03:
        free = [b.block_id for b in driver.pool.blocks if not b.ref_cnt and not b.is_null]
        driver.evict(set(rng.sample(free, min(2, len(free)))))


@pytest.mark.parametrize("seed", range(120))
def test_every_step_agrees_with_brute_force(build: SchedulerFactory, seed: int) -> None:
    rng = random.Random(seed)
    driver = CacheDriver(build(**random_options(rng)))
    ended = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - ended))


@pytest.mark.parametrize("cls", [RBLNScheduler, RBLNAsyncScheduler])
@pytest.mark.parametrize("seed", range(40))
def test_text_is_right_when_outputs_come_late(
    build: SchedulerFactory, seed: int, cls: type[RBLNScheduler]
) -> None:
    """Pipelined, or ahead of the tokens: the runner reads back what it was told to keep."""
    rng = random.Random(5000 + seed)
    driver = Driver(build(cls=cls, **random_options(rng)), depth=2, may_idle=True)
    ended = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - ended))


def test_the_sweep_reaches_what_it_is_for(build: SchedulerFactory) -> None:
    preempted = partial = copies = shortened = 0
    for seed in range(60):
        rng = random.Random(seed)
        driver = CacheDriver(build(**random_options(rng)))
        traffic(driver, rng)
        driver.run()
        preempted += sum(r.num_preemptions for r in driver.requests.values())
        partial += sum(hit % driver.content.block != 0 for hit in driver.hits)
        copies += driver.copies
        shortened += driver.shortened
    assert min(preempted, partial, copies) > 20
    assert shortened > 0
