# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts and pools. What must hold is checked by the driver at every step."""

import random
from typing import Any

import pytest

from rbln_vllm.core.limits import blocks_for
from rbln_vllm.core.scheduler import RBLNAsyncScheduler, RBLNScheduler
from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of

MAX_LEN = 48


def random_options(rng: random.Random) -> dict[str, Any]:
    block = rng.choice([2, 4, 8, 16])
    return {
        "block": block,
        "chunk": rng.choice([8, 12, 16]),
        "seqs": rng.choice([1, 2, 5, 8]),
        "blocks": blocks_for(MAX_LEN, block) + rng.choice([0, 1, 3, 20]),
        "max_len": MAX_LEN,
        "prefix": rng.random() < 0.5,
        "policy": rng.choice(["fcfs", "priority"]),
        "max_prefill_run": rng.choice([0, 1, 2, 3]),
        "watermark": rng.choice([0.0, 0.0, 0.15]),
        "steps": rng.choice([1, 1, 2, 4, 7]),
    }


def traffic(driver: Driver, rng: random.Random, requests: int = 14) -> set[str]:
    """Adds requests at random times and aborts some; returns the ids of the aborted."""
    aborted: set[str] = set()
    for i in range(requests):
        length = rng.randrange(1, MAX_LEN)
        driver.add(
            f"r{i}",
            prompt_of(length, rng.randrange(4)),
            max_tokens=rng.randrange(1, 16),
            priority=rng.randrange(3),
            arrival_time=float(i // 2),
        )
        for _ in range(rng.choice([0, 0, 1, 2, 9])):
            victim = f"r{rng.randrange(i + 1)}"
            dies = rng.random() < 0.05 and victim in driver.scheduler.requests
            if dies:
                aborted.add(victim)
            driver.step(abort_in_flight=[victim] if dies else [])
    return aborted


def check_traffic(driver: Driver, rng: random.Random) -> None:
    aborted = traffic(driver, rng)
    driver.run()
    driver.check_text(*(set(driver.requests) - aborted))


@pytest.mark.parametrize("seed", range(150))
def test_one_step_at_a_time(build: SchedulerFactory, seed: int) -> None:
    rng = random.Random(seed)
    check_traffic(Driver(build(**random_options(rng))), rng)


@pytest.mark.parametrize("cls", [RBLNScheduler, RBLNAsyncScheduler])
@pytest.mark.parametrize("seed", range(60))
def test_output_one_step_late(build: SchedulerFactory, seed: int, cls: type[RBLNScheduler]) -> None:
    """The engine's batch queue: pipelined, or scheduling ahead of the tokens."""
    rng = random.Random(1000 + seed)
    check_traffic(Driver(build(cls=cls, **random_options(rng)), depth=2, may_idle=True), rng)


def test_the_sweep_reaches_what_it_is_for(build: SchedulerFactory) -> None:
    """Preemption, hits, aborts and turns of several steps do occur in the traffic above."""
    preempted = hits = aborted = turns = 0
    for seed in range(40):
        rng = random.Random(seed)
        driver = Driver(build(**random_options(rng)))
        aborted += len(traffic(driver, rng))
        driver.run()
        preempted += sum(r.num_preemptions for r in driver.requests.values())
        hits += sum("[0:" not in row for row in driver.table if row.startswith("P"))
        turns += sum(row[:2] in ("D2", "D4", "D7") for row in driver.table)
    assert min(preempted, hits, aborted, turns) > 10
