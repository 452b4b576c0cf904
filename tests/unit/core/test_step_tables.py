# SPDX-License-Identifier: Apache-2.0
"""Step tables: what each step runs, the free blocks and queue lengths after scheduling it.

C = 8, blocks of 4 tokens, 32 grantable blocks, unless the test says otherwise.
``P a[0:8]`` is a prefill chunk, ``D a,b`` a decode batch.
"""

import pytest

from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (1, ["D a free=31", "D a free=31"]),
        (7, ["P a[0:7] free=30", "D a free=30"]),
        (8, ["P a[0:8] free=30", "D a free=29"]),
        (9, ["P a[0:8] free=30", "D a free=29", "D a free=29"]),
        (16, ["P a[0:8] free=30", "P a[8:16] free=28", "D a free=27"]),
        (17, ["P a[0:8] free=30", "P a[8:16] free=28", "D a free=27", "D a free=27"]),
    ],
)
def test_one_prompt(build: SchedulerFactory, length: int, steps: list[str]) -> None:
    driver = Driver(build())
    driver.add("a", prompt_of(length), max_tokens=2)
    driver.run().check_text()
    assert driver.table[:-1] == [f"{step} run=1 wait=0" for step in steps]
    assert driver.table[-1] == "- free=32 run=0 wait=0"  # tells the runner that a has finished


def test_two_prompts_together(build: SchedulerFactory) -> None:
    driver = Driver(build())
    driver.add("a", prompt_of(10, 1), max_tokens=2)
    driver.add("b", prompt_of(3, 2), max_tokens=3)
    driver.run().check_text()
    assert driver.table == [
        "P a[0:8] free=30 run=1 wait=1",
        "P a[8:10] free=29 run=1 wait=1",
        "P b[0:3] free=28 run=2 wait=0",
        "D a,b free=28 run=2 wait=0",
        "D b free=30 run=1 wait=0",
        "- free=32 run=0 wait=0",
    ]


ARRIVAL = {
    0: [
        "P b[0:8] free=29 run=2 wait=1",
        "P b[8:16] free=27 run=2 wait=1",
        "P b[16:20] free=26 run=2 wait=1",
        "P c[0:8] free=24 run=3 wait=0",
        "D a,b,c free=21 run=3 wait=0",
        "D a free=30 run=1 wait=0",
        "D a free=30 run=1 wait=0",
        "D a free=30 run=1 wait=0",
    ],
    1: [
        "P b[0:8] free=29 run=2 wait=1",
        "D a free=28 run=2 wait=1",
        "P b[8:16] free=26 run=2 wait=1",
        "D a free=26 run=2 wait=1",
        "P b[16:20] free=25 run=2 wait=1",
        "D a,b free=24 run=2 wait=1",
        "P c[0:8] free=28 run=2 wait=0",
        "D a,c free=27 run=2 wait=0",
    ],
    2: [
        "P b[0:8] free=29 run=2 wait=1",
        "P b[8:16] free=27 run=2 wait=1",
        "D a free=26 run=2 wait=1",
        "P b[16:20] free=25 run=2 wait=1",
        "P c[0:8] free=23 run=3 wait=0",
        "D a,b,c free=21 run=3 wait=0",
        "D a free=30 run=1 wait=0",
        "D a free=30 run=1 wait=0",
    ],
}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_prompts_arrive_amid_decodes(build: SchedulerFactory, limit: int) -> None:
    driver = Driver(build(max_prefill_run=limit))
    driver.add("a", prompt_of(3, 1), max_tokens=6)
    driver.step()
    driver.step()
    driver.add("b", prompt_of(20, 2), max_tokens=2)
    driver.add("c", prompt_of(8, 3), max_tokens=2)
    driver.run().check_text()
    assert driver.table[2:-1] == ARRIVAL[limit]


def test_unbounded_prefills_make_decodes_wait(build: SchedulerFactory) -> None:
    """The vendor's rule, and why the option exists."""
    driver = Driver(build(seqs=8))
    driver.add("a", prompt_of(3), max_tokens=3)
    driver.step()
    for i in range(5):
        driver.add(f"p{i}", prompt_of(16, i), max_tokens=1)
    driver.run().check_text()
    assert all(row.startswith("P p") for row in driver.table[1:11])


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (8, ["P b[4:8]"]),  # one token at least is computed, so the last block is no hit
        (12, ["P b[8:12]"]),
        (13, ["D b"]),  # the hit leaves one token: a decode row
        (14, ["P b[12:14]"]),
        (22, ["P b[20:22]"]),
    ],
)
def test_prefix_hit(build: SchedulerFactory, length: int, steps: list[str]) -> None:
    driver = Driver(build(prefix=True))
    driver.add("a", prompt_of(length), max_tokens=1)
    driver.run()
    before = len(driver.table)
    driver.add("b", prompt_of(length), max_tokens=1)
    driver.run().check_text()
    assert [row.split(" free")[0] for row in driver.table[before:-1]] == steps


def test_after_a_hit_chunks_return_to_multiples_of_c(build: SchedulerFactory) -> None:
    driver = Driver(build(prefix=True))
    driver.add("a", prompt_of(12), max_tokens=1)
    driver.run()
    before = len(driver.table)
    driver.add("b", prompt_of(12) + prompt_of(14, 9), max_tokens=1)
    driver.run().check_text()
    assert driver.table[before:-1] == [
        "P b[12:16] free=28 run=1 wait=0",
        "P b[16:24] free=26 run=1 wait=0",
        "P b[24:26] free=25 run=1 wait=0",
    ]


def test_long_prefill_threshold_shortens_every_chunk(build: SchedulerFactory) -> None:
    driver = Driver(build(long_prefill_token_threshold=4))
    driver.add("a", prompt_of(10), max_tokens=1)
    driver.run().check_text()
    spans = [row.split()[1] for row in driver.table[:-1]]
    assert spans == ["a[0:4]", "a[4:8]", "a[8:10]"]


def test_priority_chooses_the_waiting_request(build: SchedulerFactory) -> None:
    driver = Driver(build(policy="priority"))
    driver.add("low", prompt_of(4, 1), max_tokens=1, priority=5)
    driver.add("high", prompt_of(4, 2), max_tokens=1, priority=1)
    driver.add("mid", prompt_of(4, 3), max_tokens=1, priority=3)
    driver.run().check_text()
    order = [plan.request_ids[0] for plan in driver.plans if plan.request_ids]
    assert order == ["high", "mid", "low"]


def test_no_more_than_max_num_seqs_run(build: SchedulerFactory) -> None:
    driver = Driver(build(seqs=2))
    for i in range(5):
        driver.add(f"r{i}", prompt_of(4, i), max_tokens=3)
    driver.run().check_text()
    assert max(len(plan.request_ids) for plan in driver.plans) == 2
