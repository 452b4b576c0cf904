# SPDX-License-Identifier: Apache-2.0
"""One worker in the engine's process whose steps run beside the engine's loop."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from rbln_vllm.executor.step_thread import StepThread

StepOutput: TypeAlias = ModelRunnerOutput | None


class OverlappedExecutor(UniProcExecutor):
    """vLLM's executor of one process, with a thread that the worker's calls run on.

    Overrides of upstream: ``non_block`` calls return before they are done, so that vLLM's engine,
    which schedules one step ahead (``async_scheduling``), applies and sends a step's output and
    schedules the next while a program runs. Calls run in the order in which they were made, so
    the worker knows every token when it prepares the step after it.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self._executed: Future[StepOutput] | None = None
        self._thread = StepThread("rbln-steps")
        self.driver_worker.worker.when_launched(self._thread.launched)

    def collective_rpc(  # noqa: PLR0917 (vLLM's signature)
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        call = partial(
            super().collective_rpc, method, timeout, args, kwargs, single_value=single_value
        )
        return self._thread.submit(call) if non_block else self._thread.call(call)

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        output = super().execute_model(scheduler_output, non_block)
        self._executed = cast("Future[StepOutput]", output) if non_block else None
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        if grammar_output is not None:
            # vLLM fills the same mask again for the next step, and this one may not have run yet.
            mask = grammar_output.grammar_bitmask.copy()
            grammar_output = replace(grammar_output, grammar_bitmask=mask)
        call = partial(self._sample, self._executed, grammar_output)
        return self._thread.submit(call) if non_block else self._thread.call(call)

    def _sample(
        self, executed: Future[StepOutput] | None, grammar_output: GrammarOutput | None
    ) -> StepOutput:
        """None where the step failed: the engine then raises what ``executed`` holds."""
        if executed is not None and executed.done() and executed.exception() is not None:
            return None
        return cast(StepOutput, super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        self._thread.stop()
        super().shutdown()
