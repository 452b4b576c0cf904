# SPDX-License-Identifier: Apache-2.0
"""The runner of decoders that pool: hidden states from programs, pooled by vLLM."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.tasks import PoolingTask
from vllm.v1.core.sched.output import SchedulerOutput

from rbln_vllm.worker.pooling.model import PoolingModel
from rbln_vllm.worker.runner import ProgramRunner


class PoolingRunner(ProgramRunner):
    """Of a decoder: prefill and decode programs as for text, and what they give is pooled."""

    model: PoolingModel

    def get_supported_pooling_tasks(self) -> list[PoolingTask]:
        return sorted(self.model.pooler.get_supported_tasks())

    def _make_model(self) -> PoolingModel:
        config = self.model_config.pooler_config
        assert config is not None
        return PoolingModel(self._geometry, self._store, config)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[slice, Any, int]:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._tell_pooler(num_scheduled_tokens)
        return prepared

    def _tell_pooler(self, counts_B: NDArray[np.int32]) -> None:
        """What upstream's pooling reads: how far each request is after this step."""
        rows = len(counts_B)
        ends_B = self.input_batch.num_computed_tokens_cpu[:rows] + counts_B
        self.optimistic_seq_lens_cpu[:rows] = torch.from_numpy(ends_B)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Pooling may keep what it is given; the program's buffer is overwritten by the next step.
        return super()._model_forward(*args, **kwargs).clone()
