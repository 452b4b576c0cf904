# SPDX-License-Identifier: Apache-2.0
"""Staging: a step's ragged inputs into the fixed shapes of a program.

Each program has its own buffers, made once. Rows beyond the step's are padding and are written
on every step, so that nothing left from an earlier one can be read. The numbers of a step are few,
so NumPy handles them: an operation of torch takes several times as long to begin.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rbln_vllm.models.program_inputs import EMBEDS_INPUT
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import (
    NO_ADAPTER,
    PADDING_POSITION,
    PADDING_SLOT,
    SLOTS_INPUT,
    TensorSpec,
)
from rbln_vllm.worker.embeddings import GivenEmbeds, given_embeds

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch

PADDING_BLOCK = 0
"""vLLM's null block: reserved when the pool is made and never handed out. Padding rows name it."""
PADDING_TOKEN = 0
"""Any id the embedding has."""

Integers = NDArray[np.integer]


@dataclass(frozen=True)
class StepInputs:
    """A step before padding: ``n`` tokens of ``b`` sequences, in the order of the batch.

    ``input_ids_N``, and of each token its position and the slot of the KV pool that it fills;
    ``counts_B`` tokens and the block ids ``block_table_BT`` of each sequence. Integers of any
    width.
    """

    input_ids_N: Integers
    positions_N: Integers
    slots_N: Integers
    counts_B: Integers
    block_table_BT: Integers
    adapters_N: Integers | None = None
    """The slot of each token's adapter; None when no token has one."""
    embeds: GivenEmbeds | None = None
    """Embeddings in place of some tokens, whose ids then mean nothing."""

    def __post_init__(self) -> None:
        if not len(self.input_ids_N) == len(self.positions_N) == len(self.slots_N):
            raise ValueError("a step needs a position and a slot for every token")
        if len(self.counts_B) != len(self.block_table_BT):
            raise ValueError("a step needs a number of tokens and blocks for every sequence")
        if self.counts_B.sum() != len(self.input_ids_N):
            raise ValueError("the tokens of the sequences do not sum to the step's")
        if self.adapters_N is not None and len(self.adapters_N) != len(self.input_ids_N):
            raise ValueError("a step needs the slot of an adapter for every token")

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_N)

    @property
    def num_sequences(self) -> int:
        return len(self.block_table_BT)

    def rows_fit(self, query: int) -> bool:
        """Whether no sequence has more than ``query`` tokens."""
        return bool((self.counts_B <= query).all())

    def places(self, query: int) -> Integers:
        """Where each token goes, ``[N]``, in a program whose rows have ``query`` tokens.

        ValueError when some sequence has more.
        """
        if not self.rows_fit(query):
            raise ValueError(f"a row of {query} tokens cannot hold {self.counts_B.max()}")
        rows_N, offsets_N = _rows_and_offsets(self.counts_B)
        places_N: Integers = rows_N * query + offsets_N
        return places_N


def step_inputs(
    batch: "InputBatch", counts_B: Integers, adapters_B: Integers | None = None
) -> StepInputs:
    """The next ``counts_B[b]`` tokens of each sequence of vLLM's batch.

    ``adapters_B`` has the slot of each sequence's adapter.
    """
    rows_N, offsets_N = _rows_and_offsets(counts_B)
    positions_N = batch.num_computed_tokens_cpu[rows_N] + offsets_N
    ids_N = batch.token_ids_cpu[rows_N, positions_N]
    embeds = given_embeds(batch, rows_N, positions_N)
    if embeds is not None:
        ids_N[embeds.places_K] = PADDING_TOKEN
    table = batch.block_table[0]
    blocks_BT = table.get_numpy_array()[: len(counts_B)]
    return StepInputs(
        ids_N,
        positions_N,
        slots_of(blocks_BT, rows_N, positions_N, table.block_size),
        counts_B,
        blocks_BT,
        None if adapters_B is None else adapters_B[rows_N],
        embeds,
    )


def _rows_and_offsets(counts_B: Integers) -> tuple[Integers, Integers]:
    """Of each token its sequence and how many of that one come before it."""
    rows_N = np.repeat(np.arange(len(counts_B)), counts_B)
    first_B = np.cumsum(counts_B) - counts_B
    return rows_N, np.arange(len(rows_N)) - first_B[rows_N]


def slots_of(
    blocks_BT: Integers, rows_N: Integers, positions_N: Integers, block_size: int
) -> Integers:
    """Slots of the KV pool, int64, of each token's position in its sequence."""
    blocks_N, offsets_N = np.divmod(positions_N, block_size)
    slots_N: Integers = blocks_BT[rows_N, blocks_N].astype(np.int64) * block_size + offsets_N
    return slots_N


class StagedInputs:
    """The input buffers of one forward program.

    ``embeds`` is the shape and type of its embeddings, for one that takes such.
    """

    def __init__(
        self, key: ProgramKey, num_blocks_per_seq: int, embeds: TensorSpec | None = None
    ) -> None:
        self.key = key
        tokens = key.num_tokens
        self.tensors = {
            "input_ids": torch.zeros(tokens, dtype=torch.int32),
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "block_table": torch.zeros(key.batch, num_blocks_per_seq, dtype=torch.int32),
            "slots": torch.zeros(tokens, dtype=torch.int64),
            "query_pos": torch.zeros(tokens, dtype=torch.int32),
            SLOTS_INPUT: torch.full((tokens,), NO_ADAPTER, dtype=torch.int32),
        }
        """By the names of the program's inputs; one without adapters ignores their slots."""
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        if embeds is not None:
            self.tensors[EMBEDS_INPUT] = torch.zeros(embeds.shape, dtype=embeds.dtype)

    def stage(self, step: StepInputs) -> dict[str, Tensor]:
        """Copy a step in and pad the rest. ValueError for a step that does not fit."""
        tokens, rows = step.num_tokens, step.num_sequences
        if tokens > self.key.num_tokens or rows > self.key.batch:
            raise ValueError(
                f"{tokens} tokens of {rows} sequences do not fit program {self.key.name}"
            )
        arrays, at = self._arrays, self.rows_of(step)
        _fill(arrays["input_ids"], at, step.input_ids_N, PADDING_TOKEN)
        _fill(arrays["positions"], at, step.positions_N, 0)
        _fill(arrays["slots"], at, step.slots_N, PADDING_SLOT)
        _fill(arrays["query_pos"], at, step.positions_N, PADDING_POSITION)
        arrays[SLOTS_INPUT][:] = NO_ADAPTER
        if step.adapters_N is not None:
            arrays[SLOTS_INPUT][at] = step.adapters_N
        table = arrays["block_table"]
        _fill(table, slice(rows), step.block_table_BT[:, : table.shape[1]], PADDING_BLOCK)
        return self.tensors

    def stage_embeds(self, step: StepInputs, embeds_NE: Tensor) -> None:
        """Copy in the embeddings of a step that was staged; padding is 0."""
        buffer = self.tensors[EMBEDS_INPUT]
        buffer.zero_()
        buffer[index_of(self.rows_of(step))] = embeds_NE

    def rows_of(self, step: StepInputs) -> "Places":
        """Where the step's tokens are among the program's: a slice where no padding is between."""
        tokens, query = step.num_tokens, self.key.query
        is_full = tokens == step.num_sequences * query and step.rows_fit(query)
        if self.key.batch == 1 or is_full:
            return slice(tokens)
        return step.places(query)


Places: TypeAlias = slice | Integers


def index_of(places: Places) -> slice | Tensor:
    """As torch takes it."""
    return places if isinstance(places, slice) else torch.from_numpy(places)


def _fill(buffer: Integers, at: Places, values: Integers, padding: int) -> None:
    if isinstance(at, slice):
        buffer[at] = values
        buffer[at.stop :] = padding
    else:
        buffer[:] = padding
        buffer[at] = values
