# SPDX-License-Identifier: Apache-2.0
"""Requests that run alone on a small pool, and what they find cached."""

from typing import Any

from tests.unit.core.cache_driver import CacheDriver
from tests.unit.core.harness import Driver, SchedulerFactory

BLOCK, SUB, CHUNK, MAX_LEN = 16, 4, 8, 64


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
