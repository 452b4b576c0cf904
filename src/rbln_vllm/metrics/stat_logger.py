# SPDX-License-Identifier: Apache-2.0
"""Shows the program counters on the API server's ``/metrics``."""

import atexit
from collections.abc import Iterator
from typing import Any

import vllm.envs as vllm_envs
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from rbln_vllm import envs
from rbln_vllm.config import RBLNConfigBase
from rbln_vllm.metrics.counters import Counter, ProgramCounters, counter_path
from rbln_vllm.metrics.watchdog import Watchdog


class ProgramCollector(Collector):
    """Reads the counters when Prometheus asks."""

    def __init__(self, counters: ProgramCounters, model: str) -> None:
        self._counters, self._model = counters, model

    def collect(self) -> Iterator[Metric]:
        total = GaugeMetricFamily(
            "rbln_programs", "Programs of the program table.", labels=["model_name"]
        )
        total.add_metric([self._model], self._counters[Counter.TOTAL])
        yield total
        yield self._counter(
            "rbln_programs_compiled_after_ready",
            "Programs compiled while serving, because start-up had not prepared them.",
            Counter.COMPILED_AFTER_READY,
        )
        yield self._counter(
            "rbln_requests_refused_for_program",
            "Requests ended with an error because their program was missing.",
            Counter.REFUSED,
        )

    def _counter(self, name: str, text: str, counter: Counter) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], self._counters[counter])
        return family


class ProgramStatLogger(StatLoggerBase):
    """vLLM loads it in the API server; it registers the collector and watches the engine."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._counters: ProgramCounters | None = None
        if not isinstance(vllm_config.additional_config, RBLNConfigBase):
            return
        path = counter_path(vllm_config.instance_id)
        self._counters = ProgramCounters.create(path)
        # An engine that is killed, as vLLM does when it stops a server, leaves the file behind.
        atexit.register(path.unlink, missing_ok=True)
        model = vllm_config.model_config.served_model_name or vllm_config.model_config.model
        REGISTRY.register(ProgramCollector(self._counters, str(model)))

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the collector reads the counters itself."""

    def log_engine_initialized(self) -> None:
        """The engine is ready. A compile-only start ends here, with everything stored."""
        if envs.compile_only():
            raise SystemExit(0)
        if self._counters is not None:
            Watchdog(self._counters, vllm_envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS).start()
