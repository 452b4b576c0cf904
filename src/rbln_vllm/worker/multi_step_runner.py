# SPDX-License-Identifier: Apache-2.0
"""The runner of models that generate: a turn of the engine is one decode step or several."""

from typing import Any

from torch import Tensor
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rbln_vllm.core.multi_step import first_step_of, steps_of
from rbln_vllm.worker.inputs import Integers, StepInputs
from rbln_vllm.worker.multi_step import StopTokens, Turn
from rbln_vllm.worker.runner import ProgramRunner, RunnerOutput


class MultiStepRunner(ProgramRunner):
    """Upstream runs and samples the first step of a turn; the others follow its sampling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = 1  # of the turn under way
        self._ended: set[str] = set()  # requests, by the last turn of several steps

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> RunnerOutput:
        if self.speculation is not None:
            return super().execute_model(scheduler_output, intermediate_tensors)
        self._steps = steps_of(scheduler_output)
        self._ended -= scheduler_output.finished_req_ids
        step = first_step_of(scheduler_output)
        rows = step.num_scheduled_tokens.keys()
        if rows and rows <= self._ended:  # scheduled ahead of the news that they have ended
            self._update_states(step)
            return EMPTY_MODEL_RUNNER_OUTPUT
        return super().execute_model(step, intermediate_tensors)

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Also takes the further steps of the turn, whose tokens come with the first."""
        output = super()._sample(logits, spec_decode_metadata)
        if self._steps == 1:
            return output
        assert self._step is not None
        stops = StopTokens(self.input_batch.req_ids, self.requests)
        turn = Turn(self._steps, self._step, self.input_batch.block_table[0].block_size)
        first_B = output.sampled_token_ids[:, 0].numpy()
        output.sampled_token_ids = turn.tokens(first_B, self._next_tokens, stops)
        self._ended = stops.ended
        return output

    def _next_tokens(self, step: StepInputs, done: int) -> Integers:
        """One step after ``done`` of the turn, and what its rows draw."""
        hidden_NH = self.model.run_step(self._program(), step).hidden_NH
        logits_RV = self.model.compute_logits(hidden_NH)
        with self._keys.looking_ahead(done):
            drawn_B = self.sampler.again(logits_RV, self.input_batch.sampling_metadata)
        token_B: Integers = drawn_B.numpy()
        return token_B
