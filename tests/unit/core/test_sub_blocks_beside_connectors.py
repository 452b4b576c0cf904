# SPDX-License-Identifier: Apache-2.0
"""Prefix hits inside a block beside a store that has more of the prefix."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.core.harness import SchedulerFactory, make_request, prompt_of
from tests.unit.core.hits import BLOCK, SUB, driver_of, run_alone


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
