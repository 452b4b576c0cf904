# SPDX-License-Identifier: Apache-2.0
"""Take probes of several engines in turn, so that their figures are paired in time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.drivers import Driver, EngineError
from benchmarks.probes import Probe

# probe name -> system name -> one figure a round; None where the system had failed.
Samples = dict[str, dict[str, list[float | None]]]


@dataclass
class Notes:
    """What went wrong or was left out, for the reader of the results."""

    lines: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Say it now, and keep it."""
        print(f"note: {text}", flush=True)
        self.lines.append(text)


class Session:
    """Several engines, started one after another and ended together.

    An engine that fails is ended with a note; the others go on.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.drivers: dict[str, Driver] = {}

    @contextlib.contextmanager
    def started(self, drivers: Iterable[Driver]) -> Iterator[Session]:
        """Start them; what cannot start is left out with a note."""
        try:
            for driver in drivers:
                self._start(driver)
            yield self
        finally:
            for name in list(self.drivers):
                self._end(name)

    def about(self) -> dict[str, dict[str, Any]]:
        """What each engine told at its start."""
        return {name: driver.about for name, driver in self.drivers.items()}

    def memory_mib(self) -> dict[str, int]:
        """Memory of each engine that is alive, now."""
        return {name: driver.memory_mib() for name, driver in self.drivers.items()}

    def value(self, name: str, take: Callable[[Driver], float]) -> float | None:
        """A figure of one engine, or None when it fails now or has failed before."""
        if name not in self.drivers:
            return None
        try:
            return take(self.drivers[name])
        except EngineError as error:
            self.notes.add(str(error))
            self._end(name)
            return None

    def _start(self, driver: Driver) -> None:
        try:
            self.drivers[driver.system.name] = driver.__enter__()
        except EngineError as error:
            self.notes.add(str(error))
        else:
            print(f"started: {driver.system.label}", flush=True)

    def _end(self, name: str) -> None:
        self.drivers.pop(name).__exit__(None, None, None)


@dataclass(frozen=True)
class Rounds:
    """Samples, with the state of the machine at each round's start."""

    samples: Samples
    load_average: list[float]
    limits: list[dict[str, Any]]


def take_rounds(
    session: Session,
    probes: Sequence[Probe],
    rounds: int,
    sample_limits: Callable[[], dict[str, Any] | None],
) -> Rounds:
    """Every probe of every engine `rounds` times, engines in turn within a probe.

    Which engine goes first changes with the round. An unmeasured pass warms up.
    """
    names = list(session.drivers)
    result = Rounds({probe.name: {name: [] for name in names} for probe in probes}, [], [])
    for probe in probes:
        for name in names:
            session.value(name, _warmed_up(probe))
    for number in range(rounds):
        result.load_average.append(round(os.getloadavg()[0], 2))
        if sampled := sample_limits():
            result.limits.append(sampled)
        for probe in probes:
            for name in rotated(names, number):
                result.samples[probe.name][name].append(session.value(name, probe.measure))
        print(f"round {number + 1} of {rounds} done", flush=True)
    return result


def rotated(names: Sequence[str], by: int) -> list[str]:
    """`names` in the same circular order, beginning `by` places later."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def _warmed_up(probe: Probe) -> Callable[[Driver], float]:
    def take(driver: Driver) -> float:
        probe.warm_up(driver)
        return 0.0

    return take
