# SPDX-License-Identifier: Apache-2.0
"""Looking up embeddings, for programs that take them in place of token ids."""

from typing import Protocol

import torch
from torch import Tensor

from rbln_vllm.models.program_inputs import EMBEDS_INPUT
from rbln_vllm.programs import ProgramKey, ProgramTable
from rbln_vllm.toolchain import Executable, TensorSpec
from rbln_vllm.worker.inputs import PADDING_TOKEN, Integers, StepInputs


class Programs(Protocol):
    """Where programs come from."""

    @property
    def executable(self) -> Executable: ...

    def ensure(self, key: ProgramKey) -> None:
        """Make a program available; MissingProgramError when it may not be compiled now."""
        ...


def embeds_spec(executable: Executable, key: ProgramKey) -> TensorSpec | None:
    """Shape and type of the embeddings that a forward program takes; None for one of token ids.

    MissingProgramError when the program is not there.
    """
    return executable.load(key.name).graph.inputs.get(EMBEDS_INPUT)


class EmbedPrograms:
    """The embeddings of a step."""

    def __init__(self, table: ProgramTable, store: Programs) -> None:
        self._table, self._store = table, store
        self._staged: dict[ProgramKey, Tensor] = {}

    def of(self, step: StepInputs) -> Tensor:
        """``[n, E]`` of the step's tokens: looked up, or as they were given. Valid until the next
        call. MissingProgramError when the program may not be compiled now."""
        embeds_NE = self.look_up(step.input_ids_N)
        if step.embeds is not None:
            step.embeds.fill(embeds_NE)
        return embeds_NE

    def look_up(self, ids_N: Integers) -> Tensor:
        """``[n, E]`` of tokens, no more than a prefill or decode program has; as ``of``."""
        key = self._table.embed_for(len(ids_N))
        self._store.ensure(key)
        if key not in self._staged:
            self._staged[key] = torch.zeros(key.batch, dtype=torch.int32)
        staged_N = self._staged[key].numpy()
        staged_N[: len(ids_N)] = ids_N
        staged_N[len(ids_N) :] = PADDING_TOKEN
        inputs = {"input_ids": self._staged[key]}
        (embeds_NE,) = self._store.executable.run(key.name, inputs, len(ids_N))
        return embeds_NE[: len(ids_N)]
