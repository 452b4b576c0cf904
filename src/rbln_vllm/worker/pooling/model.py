# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runner takes for a pooling model: programs, and vLLM's own pooler over them."""

from torch import Tensor
from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.pooler.seqwise import pooler_for_classify, pooler_for_embed
from vllm.model_executor.layers.pooler.tokwise import pooler_for_token_embed

from rbln_vllm.geometry import Geometry
from rbln_vllm.pooling import Pooling
from rbln_vllm.pooling_programs import EncoderTable, PoolingTable
from rbln_vllm.programs import ProgramKey
from rbln_vllm.worker.pooling.inputs import EncoderInputs, StagedEncoder
from rbln_vllm.worker.program_model import ProgramModel
from rbln_vllm.worker.program_store import ProgramStore


class PoolingModel(ProgramModel):
    """Also has ``pooler``, whose classifier, if there is one, is programs.

    To be made where vLLM's current configuration is set: poolers read it.
    """

    is_pooling_model = True

    def __init__(self, geometry: Geometry, store: ProgramStore, config: PoolerConfig) -> None:
        super().__init__(geometry, store)
        assert geometry.pooling is not None
        self._staged_encoders: dict[ProgramKey, StagedEncoder] = {}
        self._head_rows: dict[ProgramKey, Tensor] = {}
        self.pooler = self._make_pooler(geometry.pooling, config)

    def run_encoder(self, step: EncoderInputs) -> Tensor:
        """Hidden states ``[n, hidden]`` of the step's tokens, the caller's to keep.

        Raises MissingProgramError when the program may not be compiled now.
        """
        assert isinstance(self._table, EncoderTable)
        key = self._table.encoder_for(step.num_sequences, step.num_tokens)
        self._store.ensure(key)
        if key not in self._staged_encoders:
            self._staged_encoders[key] = StagedEncoder(key)
        inputs = self._staged_encoders[key].stage(step)
        self.launched()
        (hidden_NH,) = self._store.executable.run(key.name, inputs, step.num_tokens)
        return hidden_NH[: step.num_tokens].clone()

    def classify_rows(self, pooled_RH: Tensor) -> Tensor:
        """A classifier's logits ``[R, labels]``, the caller's to keep. Raises as above."""
        assert isinstance(self._table, PoolingTable)
        rows = pooled_RH.shape[0]
        key = self._table.head_for(rows)
        self._store.ensure(key)
        if key not in self._head_rows:
            self._head_rows[key] = pooled_RH.new_zeros(key.batch, pooled_RH.shape[1])
        padded_BH = self._head_rows[key]
        padded_BH[:rows] = pooled_RH
        padded_BH[rows:] = 0
        (logits_BL,) = self._store.executable.run(key.name, {"hidden": padded_BH}, rows)
        return logits_BL[:rows].clone()

    def _make_pooler(self, pooling: Pooling, config: PoolerConfig) -> Pooler:
        if pooling.has_head:
            return DispatchPooler(
                {"classify": pooler_for_classify(config, classifier=self.classify_rows)}
            )
        poolers: dict[str, Pooler] = {"embed": pooler_for_embed(config)}
        if pooling.is_encoder:
            poolers["token_embed"] = pooler_for_token_embed(config)
        return DispatchPooler(poolers)
