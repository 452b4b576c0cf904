# SPDX-License-Identifier: Apache-2.0
"""The runner of encoders. A request is one step, so that no batch is kept from step to step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.pooling_params import PoolingParams
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, PoolerOutput
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from rbln_vllm.core.step import StepKind, StepPlan, whole_prompts
from rbln_vllm.toolchain import MissingProgramError
from rbln_vllm.worker.pooling.inputs import encoder_step
from rbln_vllm.worker.pooling.runner import PoolingRunner
from rbln_vllm.worker.runner import RunnerOutput

SECOND_SEGMENT = "compressed_token_type_ids"
"""Under which vLLM's parameters of a pair say at which token its second text begins."""

WHOLE_SEQUENCES = ("embed", "classify")
"""Tasks that make a new row of a sequence's hidden states."""


class EncoderRunner(PoolingRunner):
    """Whole prompts, any number of them in a step, and no KV pool.

    Override of upstream: a step is made from the scheduler's output alone. Upstream's persistent
    batch is for requests of many steps; entering and leaving it took a third of the interpreter's
    time of a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[str, NewRequestData] = {}  # until finished: a preempted one comes again

    def _classify(self, scheduler_output: SchedulerOutput) -> StepPlan:
        return whole_prompts(scheduler_output)

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> RunnerOutput:
        """Run one step. A step whose program may not be compiled now is refused, not fatal."""
        self._forget(scheduler_output.finished_req_ids)
        self._plan = plan = self._classify(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = new
            self.late_interaction_runner.register_request(new.req_id, new.pooling_params)
        if plan.kind is StepKind.EMPTY:
            return EMPTY_MODEL_RUNNER_OUTPUT
        try:
            return self._answer([self._known[name] for name in plan.request_ids])
        except MissingProgramError as error:
            return self._refuse(error)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self._known.pop(name, None)
        self._refused.difference_update(request_ids)
        self.late_interaction_runner.on_requests_finished(request_ids)

    def _answer(self, requests: Sequence[NewRequestData]) -> ModelRunnerOutput:
        """What the requests, none of which may be an embedding's, are answered with."""
        names = [request.req_id for request in requests]
        params = [_params_of(request) for request in requests]
        segments = [(one.extra_kwargs or {}).get(SECOND_SEGMENT) for one in params]
        step = encoder_step([request.prompt_token_ids or [] for request in requests], segments)
        hidden_NH = self.model.run_encoder(step)
        if any(one.task not in WHOLE_SEQUENCES for one in params):
            hidden_NH = hidden_NH.clone()  # what is answered would be parts of the buffer
        pooled = self._pooled(hidden_NH, step.lengths_B, params, names)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            pooler_output=list(pooled),
        )

    def _pooled(
        self,
        hidden_NH: Tensor,
        lengths_B: NDArray[Any],
        params: list[PoolingParams],
        names: list[str],
    ) -> PoolerOutput:
        lengths = torch.from_numpy(lengths_B)
        metadata = PoolingMetadata(
            prompt_lens=lengths,
            prompt_token_ids=None,
            prompt_token_ids_cpu=None,
            pooling_params=params,
            pooling_states=[PoolingStates() for _ in params],
        )
        metadata.build_pooling_cursor(lengths_B, lengths, hidden_NH.device)
        pooled: PoolerOutput = self.model.pooler(hidden_NH, metadata)
        return self.late_interaction_runner.postprocess_pooler_output(
            raw_pooler_output=pooled,
            pooling_params=params,
            req_ids=names,
            finished_mask=[True] * len(names),
        )


def _params_of(request: NewRequestData) -> PoolingParams:
    assert request.pooling_params is not None, request.req_id
    return request.pooling_params
