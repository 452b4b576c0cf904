# SPDX-License-Identifier: Apache-2.0
"""Two engines on the same cores at once against one alone.

Alone and together are measured in turn. The share is the sum of both throughputs together as a
share of the throughput alone: 1 means that nothing is lost by sharing.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.drivers import Driver, EngineError
from benchmarks.measure import Notes
from benchmarks.plan import Plan

BATCH, TOKENS_IN, TOKENS_OUT = 8, 128, 64


def measure_sharing(first: Driver, second: Driver, plan: Plan, notes: Notes) -> dict[str, Any]:
    """Throughputs alone and together, and the shares; empty with a note when an engine fails."""
    try:
        with first, second:
            return _measure(first, second, plan)
    except EngineError as error:
        notes.add(f"sharing: {error}")
        return {}


def _measure(first: Driver, second: Driver, plan: Plan) -> dict[str, Any]:
    for driver in (first, second):
        driver.ask("run", batch=BATCH, tokens_in=TOKENS_IN, tokens_out=TOKENS_OUT)
    alone: list[float] = []
    together: list[list[float]] = []
    for number in range(plan.fewer_rounds):
        alone.append(_rates([(first, second)[number % 2]], plan.sharing_seconds)[0])
        together.append(_rates([first, second], plan.sharing_seconds))
    return {
        "batch": BATCH,
        "alone_tokens_per_s": alone,
        "together_tokens_per_s": together,
        "shares": shares(alone, together),
    }


def _rates(drivers: list[Driver], seconds: float) -> list[float]:
    """Tokens per second of each driver while all of them work."""
    for driver in drivers:
        driver.send(
            "loop", batch=BATCH, tokens_in=TOKENS_IN, tokens_out=TOKENS_OUT, seconds=seconds
        )
    answers = [driver.receive() for driver in drivers]
    return [answer["tokens"] / answer["seconds"] for answer in answers]


def shares(alone: list[float], together: list[list[float]]) -> list[float]:
    """Sum together over the mean alone before and after it, one a round."""
    found = []
    for number, rates in enumerate(together):
        around = alone[number : number + 2]
        found.append(round(sum(rates) / statistics.mean(around), 3))
    return found
