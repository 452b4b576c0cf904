# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runner takes for a pooling model: programs, and vLLM's own pooler over them."""

from torch import Tensor
from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.pooler.seqwise import pooler_for_classify, pooler_for_embed
from vllm.model_executor.layers.pooler.tokwise import pooler_for_token_embed
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.metadata import PoolingMetadata

from rbln_vllm.geometry import Geometry
from rbln_vllm.pooling.config import Pooling
from rbln_vllm.worker.embed_programs import Programs
from rbln_vllm.worker.pooling.programs import PoolingPrograms


class TaskPooler(DispatchPooler):
    """vLLM's, that does not take apart a batch whose requests all have the same task."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        tasks = set(pooling_metadata.tasks)
        if len(tasks) != 1:
            return super().forward(hidden_states, pooling_metadata)
        return self.poolers_by_task[tasks.pop()](hidden_states, pooling_metadata)


class PoolingModel(PoolingPrograms):
    """Also has ``pooler``, whose classifier, if there is one, is programs.

    To be made where vLLM's current configuration is set: poolers read it.
    """

    is_pooling_model = True

    def __init__(self, geometry: Geometry, store: Programs, config: PoolerConfig) -> None:
        super().__init__(geometry, store)
        assert geometry.pooling is not None
        self.pooler = self._make_pooler(geometry.pooling, config)

    def _make_pooler(self, pooling: Pooling, config: PoolerConfig) -> Pooler:
        if pooling.has_head:
            return TaskPooler(
                {"classify": pooler_for_classify(config, classifier=self.classify_rows)}
            )
        poolers: dict[str, Pooler] = {"embed": pooler_for_embed(config)}
        if pooling.is_encoder:
            poolers["token_embed"] = pooler_for_token_embed(config)
        return TaskPooler(poolers)
