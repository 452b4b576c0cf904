# SPDX-License-Identifier: Apache-2.0
"""Running the programs of pooling models: those of encoders, and classifiers. Needs no engine."""

from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.pooling.programs import EncoderTable, PoolingTable
from rbln_vllm.programs import ProgramKey
from rbln_vllm.worker.embed_programs import Programs
from rbln_vllm.worker.pooling.inputs import EncoderInputs, StagedEncoder
from rbln_vllm.worker.program_model import ProgramModel


class PoolingPrograms(ProgramModel):
    """Also runs the programs of encoders and of classifiers."""

    def __init__(self, geometry: Geometry, store: Programs) -> None:
        super().__init__(geometry, store)
        self._staged_encoders: dict[ProgramKey, StagedEncoder] = {}
        self._head_rows: dict[ProgramKey, Tensor] = {}

    def run_encoder(self, step: EncoderInputs) -> Tensor:
        """Hidden states ``[n, hidden]`` of the step's tokens.

        They are the program's own buffer, valid until its next run. Raises MissingProgramError
        when the program may not be compiled now.
        """
        assert isinstance(self._table, EncoderTable)
        key = self._table.encoder_for(step.num_sequences, step.num_tokens)
        self._store.ensure(key)
        if key not in self._staged_encoders:
            self._staged_encoders[key] = StagedEncoder(key)
        inputs = self._staged_encoders[key].stage(step)
        self.launched()
        (hidden_NH,) = self._store.executable.run(key.name, inputs, step.num_tokens)
        return hidden_NH[: step.num_tokens]

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
