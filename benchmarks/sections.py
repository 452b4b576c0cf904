# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark: each starts its engines, measures, ends them, returns plain data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.costs import read_shape
from benchmarks.drivers import Driver, EngineError
from benchmarks.engines.protocol import Settings
from benchmarks.limits import LimitsProgram, NoLimitsError
from benchmarks.measure import Notes, Session, rotated, take_rounds
from benchmarks.models import ModelError, prepare, prepare_random
from benchmarks.paths import COMPILE_CACHES
from benchmarks.plan import CONTEXT, LARGE, SMALL, Plan, Sizes
from benchmarks.probes import Probe, describe
from benchmarks.servers import Server
from benchmarks.serving import measure_servers
from benchmarks.sharing import measure_sharing
from benchmarks.systems import OURS, SYSTEMS, System

COLD_STARTS = ("ours", "vllm_cpu", "openvino", "llama_cpp")
# Several engines hold the large model at once, in memory that suffices for three.
LARGE_SYSTEMS = ("ours", "vllm_cpu_all", "openvino")
HTTP_SYSTEMS = ("ours", "vllm_cpu", "vllm_cpu_all")


class Bench:
    """What all sections share."""

    def __init__(
        self,
        model: Path,
        systems: Sequence[str],
        plan: Plan,
        *,
        seconds: float,
        notes: Notes,
    ) -> None:
        """`seconds` bounds one answer of an engine and one load of a server."""
        self.model = model
        self.plan = plan
        self.notes = notes
        self.seconds = seconds
        self._systems = self._installed(systems)
        self._limits = self._limits_program()

    def limits(self) -> dict[str, Any] | None:
        """A sample of the machine's limits; None where they cannot be measured."""
        return self._limits.measure() if self._limits else None

    def starts(self) -> dict[str, Any]:
        """Seconds until ready with an empty compile cache, and with the one that this left."""
        found: dict[str, list[dict[str, Any]]] = {}
        systems = list(self._chosen(COLD_STARTS))
        for number in range(self.plan.fewer_rounds):
            for system in rotated([system.name for system in systems], number):
                found.setdefault(system, []).extend(self._cold_and_warm(SYSTEMS[system]))
        return {"starts": found}

    def decode(self) -> dict[str, Any]:
        """The small model: decode by batch, and prefill."""
        return self._paired(self.model, SMALL, self.plan.small, tuple(SYSTEMS), self.plan.rounds)

    def context(self) -> dict[str, Any]:
        """The small model: decode by context."""
        names = [name for name, system in SYSTEMS.items() if system.comparable]
        return self._paired(self.model, CONTEXT, self.plan.context, names, self.plan.fewer_rounds)

    def large(self) -> dict[str, Any]:
        """A model whose weights are far larger than any cache."""
        model = prepare_random(self.model)
        return self._paired(model, LARGE, self.plan.large, LARGE_SYSTEMS, self.plan.fewer_rounds)

    def serving(self) -> dict[str, Any]:
        """Load over HTTP."""
        settings = self._settings(self.model, SMALL)
        servers = [Server(system, settings) for system in self._chosen(HTTP_SYSTEMS)]
        return measure_servers(servers, self.plan, self.notes, self.seconds)

    def sharing(self) -> dict[str, Any]:
        """Two engines of ours on the same cores."""
        settings = self._settings(self.model, SMALL)
        pair = [
            Driver(SYSTEMS[OURS], settings, seconds=self.seconds, log_name=f"ours-{name}")
            for name in ("first", "second")
        ]
        return measure_sharing(pair[0], pair[1], self.plan, self.notes)

    def _paired(
        self,
        model: Path,
        sizes: Sizes,
        probes: Sequence[Probe],
        names: Sequence[str],
        rounds: int,
    ) -> dict[str, Any]:
        session, shape = Session(self.notes), read_shape(model)
        with session.started(self._drivers(model, sizes, names)):
            about = session.about()
            taken = take_rounds(session, probes, rounds, self.limits)
            memory = session.memory_mib()
        return {
            "model": model.name,
            "shape": asdict(shape),
            "sizes": asdict(sizes),
            "systems": about,
            "memory_mib": memory,
            "probes": [describe(probe, shape) for probe in probes],
            **asdict(taken),
        }

    def _cold_and_warm(self, system: System) -> Iterator[dict[str, Any]]:
        cache = COMPILE_CACHES / f"start-{system.name}"
        shutil.rmtree(cache, ignore_errors=True)
        try:
            for kind in ("cold", "warm"):
                for driver in self._drivers(self.model, SMALL, [system.name], cache):
                    with driver:
                        yield {"kind": kind, **driver.about}
        except EngineError as error:
            self.notes.add(str(error))
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    def _drivers(
        self, model: Path, sizes: Sizes, names: Sequence[str], cache: Path | None = None
    ) -> Iterator[Driver]:
        for system in self._chosen(names):
            try:
                path = prepare(system.model_format, model)
            except ModelError as error:
                self.notes.add(f"{system.label} is left out: {error}")
                continue
            settings = self._settings(path, sizes)
            yield Driver(system, settings, seconds=self.seconds, compile_cache=cache)

    def _settings(self, model: Path, sizes: Sizes) -> Settings:
        return Settings(str(model.resolve()), **asdict(sizes))

    def _chosen(self, names: Sequence[str]) -> Iterator[System]:
        return (system for system in self._systems if system.name in names)

    def _installed(self, names: Sequence[str]) -> list[System]:
        found = []
        for name in names:
            if problem := SYSTEMS[name].missing():
                self.notes.add(problem)
            else:
                found.append(SYSTEMS[name])
        return found

    def _limits_program(self) -> LimitsProgram | None:
        try:
            return LimitsProgram()
        except NoLimitsError as error:
            self.notes.add(str(error))
            return None


Section = Callable[[Bench], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "decode": Bench.decode,
    "context": Bench.context,
    "large": Bench.large,
    "starts": Bench.starts,
    "serving": Bench.serving,
    "sharing": Bench.sharing,
}
