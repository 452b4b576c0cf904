# SPDX-License-Identifier: Apache-2.0
"""Staging: a step's ragged inputs into the fixed shapes of a program.

Each program has its own buffers, made once. Rows beyond the step's are padding and are written
on every step, so that nothing left from an earlier one can be read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import PADDING_POSITION, PADDING_SLOT

PADDING_BLOCK = 0
"""vLLM's null block: reserved when the pool is made and never handed out. Padding rows name it."""
PADDING_TOKEN = 0
"""Any id the embedding has."""


@dataclass(frozen=True)
class StepInputs:
    """A step before padding: ``n`` tokens of ``b`` sequences, in the order of the batch.

    ``input_ids_N`` int32, ``positions_N`` int64; ``paged`` holds ``b`` rows of block ids, and the
    slot and position of each token.
    """

    input_ids_N: Tensor
    positions_N: Tensor
    paged: PagedInputs

    def __post_init__(self) -> None:
        tokens = self.input_ids_N.shape[0]
        if self.positions_N.shape[0] < tokens or self.paged.slots_N.shape[0] < tokens:
            raise ValueError("a step needs a position and a slot for every token")

    @property
    def num_tokens(self) -> int:
        return self.input_ids_N.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.paged.block_table_BT.shape[0]


class StagedInputs:
    """The input buffers of one forward program."""

    def __init__(self, key: ProgramKey, num_blocks_per_seq: int) -> None:
        self.key = key
        tokens = key.num_tokens
        self._input_ids_N = torch.zeros(tokens, dtype=torch.int32)
        self._positions_N = torch.zeros(tokens, dtype=torch.int64)
        self._block_table_BT = torch.zeros(key.batch, num_blocks_per_seq, dtype=torch.int32)
        self._slots_N = torch.zeros(tokens, dtype=torch.int64)
        self._query_pos_N = torch.zeros(tokens, dtype=torch.int32)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names of the program's inputs."""
        return {
            "input_ids": self._input_ids_N,
            "positions": self._positions_N,
            "block_table": self._block_table_BT,
            "slots": self._slots_N,
            "query_pos": self._query_pos_N,
        }

    def stage(self, step: StepInputs) -> dict[str, Tensor]:
        """Copy a step in and pad the rest. ValueError for a step that does not fit."""
        tokens, rows = step.num_tokens, step.num_sequences
        if tokens > self.key.num_tokens or rows > self.key.batch:
            raise ValueError(
                f"{tokens} tokens of {rows} sequences do not fit program {self.key.name}"
            )
        _fill(self._input_ids_N, step.input_ids_N, tokens, PADDING_TOKEN)
        _fill(self._positions_N, step.positions_N, tokens, 0)
        _fill(self._slots_N, step.paged.slots_N, tokens, PADDING_SLOT)
        _fill(self._query_pos_N, step.paged.query_pos_N, tokens, PADDING_POSITION)
        width = self._block_table_BT.shape[1]
        _fill(self._block_table_BT, step.paged.block_table_BT[:, :width], rows, PADDING_BLOCK)
        return self.tensors


def _fill(buffer: Tensor, values: Tensor, count: int, padding: int) -> None:
    buffer[:count] = values[:count]
    buffer[count:] = padding
