# SPDX-License-Identifier: Apache-2.0
"""A request may leave at any step: only it ends, and its blocks come back."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of

Scenario = Callable[[SchedulerFactory], Driver]


def ten_chunks_beside_a_decode(build: SchedulerFactory) -> Driver:
    driver = Driver(build(max_prefill_run=1))
    driver.add("a", prompt_of(3, 1), max_tokens=14)
    driver.add("b", prompt_of(80, 2), max_tokens=3)
    return driver


def queue_behind_one_slot(build: SchedulerFactory) -> Driver:
    driver = Driver(build(seqs=1))
    for i, name in enumerate("abc"):
        driver.add(name, prompt_of(10, i), max_tokens=4)
    return driver


def preemption(build: SchedulerFactory) -> Driver:
    driver = Driver(build(blocks=8, max_len=28, seqs=3))
    for i, name in enumerate("abc"):
        driver.add(name, prompt_of(8, i), max_tokens=10)
    return driver


def shared_prefix(build: SchedulerFactory) -> Driver:
    driver = Driver(build(prefix=True, policy="priority"))
    for i, name in enumerate("abc"):
        driver.add(name, prompt_of(13), max_tokens=5, priority=i, arrival_time=1.0)
    return driver


SCENARIOS: list[Scenario] = [
    ten_chunks_beside_a_decode,
    queue_behind_one_slot,
    preemption,
    shared_prefix,
]


@pytest.mark.parametrize("in_flight", [False, True], ids=["between-steps", "in-flight"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_abort_at_every_step(build: SchedulerFactory, scenario: Scenario, in_flight: bool) -> None:
    whole = scenario(build).run()
    for victim in whole.requests:
        for step in range(len(whole.table)):
            driver = scenario(build)
            for _ in range(step):
                driver.step()
            if in_flight:
                driver.step(abort_in_flight=[victim])
            else:
                driver.abort(victim)
            driver.run().check_text(*(set(driver.requests) - {victim}))


def test_d08_cancel_during_chunked_prefill(build: SchedulerFactory) -> None:
    driver = ten_chunks_beside_a_decode(build)
    while driver.requests["b"].num_computed_tokens < 16:
        driver.step()
    driver.abort("b")
    plan = driver.step()
    assert plan.request_ids == ("a",)
    driver.run().check_text("a")


def children(driver: Driver, lengths: tuple[int, ...], **options: Any) -> list[str]:
    """What the front end makes of n > 1: requests of one prompt and one arrival time."""
    names = [f"{i}_parent" for i in range(len(lengths))]
    for name, max_tokens in zip(names, lengths, strict=True):
        driver.add(name, prompt_of(18), max_tokens=max_tokens, arrival_time=1.0, **options)
    return names


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_d28_children_leave_nothing_after_an_abort(build: SchedulerFactory, policy: str) -> None:
    driver = Driver(build(prefix=True, policy=policy))
    names = children(driver, (20, 20, 3, 20))
    while names[2] not in driver.finished:
        driver.step()
    driver.abort(*(name for name in names if name not in driver.finished))
    driver.run().check_text(names[2])
    assert driver.finished.keys() == {names[2]}


def test_d28_children_do_not_overwrite_one_another(build: SchedulerFactory) -> None:
    driver = Driver(build(prefix=True))
    children(driver, (9, 2, 7, 5))
    driver.run().check_text()


@pytest.mark.parametrize("steps", range(8))
def test_d30_a_leaver_never_stops_somebody_else(build: SchedulerFactory, steps: int) -> None:
    """a runs, b queues behind it: b leaves first, then a, with a prefilling or decoding."""
    driver = Driver(build(seqs=1))
    driver.add("a", prompt_of(20, 1), max_tokens=20)
    driver.add("b", prompt_of(20, 2), max_tokens=20)
    driver.add("c", prompt_of(5, 3), max_tokens=2)
    for _ in range(steps):
        driver.step()
    driver.abort("b")
    assert driver.step().request_ids == ("a",)
    driver.abort("a")
    assert driver.free_blocks == driver.free_at_start
    assert driver.step().request_ids == ("c",)
    driver.run().check_text("c")


def test_aborting_everything_empties_every_list(build: SchedulerFactory) -> None:
    driver = preemption(build)
    for _ in range(9):
        driver.step()
    driver.abort(*driver.requests)
    driver.run(limit=1)
