# SPDX-License-Identifier: Apache-2.0
"""The worker process: device set-up, programs, pool size, warm-up."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

# vLLM's stand-ins for CUDA streams and events; upstream asks that it be imported first.
import vllm.v1.worker.cpu.shm  # isort: skip  # noqa: F401

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from rbln_vllm import envs
from rbln_vllm.geometry import Geometry, geometry_of
from rbln_vllm.lora.slots import slot_bytes
from rbln_vllm.metrics.counters import Counter, ProgramCounters, counter_path
from rbln_vllm.startup.start_method import is_forked
from rbln_vllm.toolchain import host_toolchain
from rbln_vllm.worker.heartbeat import Heartbeat
from rbln_vllm.worker.memory import check_pool, kv_budget
from rbln_vllm.worker.multi_step_runner import MultiStepRunner
from rbln_vllm.worker.pooling.encoder_runner import EncoderRunner
from rbln_vllm.worker.pooling.runner import PoolingRunner
from rbln_vllm.worker.program_store import ProgramStore
from rbln_vllm.worker.runner import ProgramRunner, RunnerOutput
from rbln_vllm.worker.threads import allowed_cpus
from rbln_vllm.worker.warm_up import warm_up

logger = init_logger("vllm.rbln.worker")


class RBLNWorker(CPUWorker):
    """A CPU worker whose model is programs.

    Overrides of upstream: no thread binding and no memory pool of torch's own, memory measured
    over all nodes the process may use, programs compiled or loaded in place of a model.
    """

    model_runner: ProgramRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        # Not CPUWorker's: it binds memory to one node and refuses more than that node has free.
        Worker.__init__(
            self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker
        )
        self.parallel_config.disable_custom_all_reduce = True
        self._geometry = geometry_of(vllm_config)
        self._counters = ProgramCounters.create(counter_path(vllm_config.instance_id))
        self._heartbeat = Heartbeat(self._counters)
        self._answer: RunnerOutput = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self._cpus = allowed_cpus()
        self._store = ProgramStore(
            self.vllm_config, self._geometry, host_toolchain(self._cpus), self._counters
        )
        runner = _runner_class(self._geometry)
        self.model_runner = runner(self.vllm_config, self.device, self._geometry, self._store)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def determine_available_memory(self) -> int:
        """Bytes for the KV pool; refuses one that cannot hold a sequence of the maximum length."""
        layers, adapters = self.model_runner.kv_layers, self._store.adapters
        budget = kv_budget(
            self.vllm_config,
            self._geometry,
            layers,
            self._store.executable.weight_bytes,
            0 if adapters is None else slot_bytes(adapters),
        )
        logger.info("KV pool: up to %.2f GiB", budget / (1 << 30))
        check_pool(self.vllm_config, self._geometry, layers, budget)
        return budget

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run every program once on padding, then declare the worker ready."""
        if envs.compile_only():
            logger.info("Compile only: every program is in the cache; nothing is run")
            return CompilationTimes(language_model=0.0, encoder=0.0)
        # vLLM sets one thread for its own tensor work; what falls back to torch and sampling are
        # ours. Forked, idle threads would spin on the CPUs that programs run on.
        torch.set_num_threads(1 if is_forked() else len(self._cpus))
        logger.info(
            "Programs run on the %s; one thread on each of the CPUs %s",
            self._store.executable.description,
            ", ".join(map(str, self._cpus)),
        )
        times = warm_up(self._geometry.table, self._store, self._geometry.num_blocks_per_seq)
        if self.model_runner.speculation is not None:
            self.model_runner.speculation.warm_up()
        self._store.mark_ready()
        self._heartbeat.start()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=times, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> RunnerOutput:
        with self._heartbeat.step():
            self._answer = cast(RunnerOutput, super().execute_model(scheduler_output))
            return self._answer

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> RunnerOutput:
        """Tokens of the step before; its answer, where it was refused.

        An engine that schedules ahead asks for tokens before it can know of a refusal.
        """
        if self._answer is not None:
            return self._answer
        with self._heartbeat.step():
            return cast(RunnerOutput, super().sample_tokens(grammar_output))

    def when_launched(self, call: Callable[[], None]) -> None:
        """Have ``call`` made on the worker's thread whenever a step's program is about to start."""
        self.model_runner.model.launched = call

    def program_report(self) -> dict[str, int]:
        """The program counters, for tests and operators (``collective_rpc``)."""
        shown = (Counter.TOTAL, Counter.COMPILED_AFTER_READY, Counter.REFUSED)
        return {counter.name.lower(): self._counters[counter] for counter in shown}

    def shutdown(self) -> None:
        self._heartbeat.stop()
        super().shutdown()
        counter_path(self.vllm_config.instance_id).unlink(missing_ok=True)


def _runner_class(geometry: Geometry) -> type[ProgramRunner]:
    if geometry.pooling is None:
        return MultiStepRunner
    return EncoderRunner if geometry.pooling.is_encoder else PoolingRunner
