# SPDX-License-Identifier: Apache-2.0
"""Staging for a drafter's programs: the rows' new tokens, and the places of tokens to come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import PADDING_POSITION, PADDING_SLOT, TensorSpec
from rbln_vllm.worker.inputs import PADDING_BLOCK, PADDING_TOKEN, Integers, slots_of

TARGET = "target_hidden"
PADDING = {
    "input_ids": PADDING_TOKEN,
    "positions": 0,
    "block_table": PADDING_BLOCK,
    "slots": PADDING_SLOT,
    "query_pos": PADDING_POSITION,
    "last_rows": 0,
    "later_positions": 0,
    "later_slots": PADDING_SLOT,
    "later_query_pos": PADDING_POSITION,
}
"""What rows and tokens beyond the step's hold, by input."""


@dataclass(frozen=True)
class DraftRow:
    """``n`` tokens of one sequence that the drafter has not read, at positions that follow each
    other from ``start`` on.

    ``states_n`` are the rows of the target's hidden states to read beside them; ``blocks_T`` the
    sequence's blocks.
    """

    tokens_n: Integers
    start: int
    states_n: Integers
    blocks_T: Integers

    def __post_init__(self) -> None:
        if len(self.tokens_n) != len(self.states_n) or self.start < 0:
            raise ValueError("a row of a drafter has a state for every token")

    def __len__(self) -> int:
        return len(self.tokens_n)

    @property
    def positions_n(self) -> Integers:
        positions_n: Integers = np.arange(self.start, self.start + len(self))
        return positions_n

    def split(self, count: int) -> tuple["DraftRow", "DraftRow"]:
        """The first ``count`` tokens, and the rest."""
        first = DraftRow(self.tokens_n[:count], self.start, self.states_n[:count], self.blocks_T)
        rest = DraftRow(
            self.tokens_n[count:], self.start + count, self.states_n[count:], self.blocks_T
        )
        return first, rest

    def until(self, position: int) -> "DraftRow":
        """The tokens before ``position``."""
        return self.split(max(0, min(len(self), position - self.start)))[0]


class DraftInputs:
    """The input buffers of one draft program, of the sizes that it says: ``specs`` are its inputs
    by name, those of the pool left out. Padding is written in every step."""

    def __init__(self, key: ProgramKey, specs: Mapping[str, TensorSpec], block_size: int) -> None:
        self._key, self._block_size = key, block_size
        self.tensors = {n: torch.zeros(spec.shape, dtype=spec.dtype) for n, spec in specs.items()}
        """By the names of the program's inputs."""
        self._arrays = {n: tensor.numpy() for n, tensor in self.tensors.items() if n != TARGET}
        self._later = len(self._arrays.get("later_slots", ()))

    def stage(self, rows: Sequence[DraftRow], states_NW: Tensor | None) -> dict[str, Tensor]:
        """Copy the rows in and pad the rest. ValueError for rows that do not fit."""
        longest = max(map(len, rows), default=0)
        if len(rows) > self._key.batch or longest > self._key.query:
            raise ValueError(
                f"{len(rows)} rows of up to {longest} tokens do not fit program {self._key.name}"
            )
        for name, padding in PADDING.items():
            if name in self._arrays:
                self._arrays[name].fill(padding)
        for index, row in enumerate(rows):
            self._stage_row(index, row)
        if states_NW is not None:
            self._stage_states(rows, states_NW)
        return self.tensors

    def _stage_row(self, index: int, row: DraftRow) -> None:
        arrays, begin = self._arrays, index * self._key.query
        new = slice(begin, begin + len(row))
        arrays["input_ids"][new] = row.tokens_n
        arrays["positions"][new] = arrays["query_pos"][new] = row.positions_n
        arrays["slots"][new] = self._slots(row, row.positions_n)
        width = arrays["block_table"].shape[1]
        arrays["block_table"][index, : len(row.blocks_T)] = row.blocks_T[:width]
        if "last_rows" in arrays:
            arrays["last_rows"][index] = begin + len(row) - 1
        if self._later:
            end = row.start + len(row)
            later: Integers = np.arange(end, end + self._later)
            arrays["later_positions"][:, index] = arrays["later_query_pos"][:, index] = later
            arrays["later_slots"][:, index] = self._slots(row, later)

    def _slots(self, row: DraftRow, positions: Integers) -> Integers:
        rows = np.zeros(len(positions), np.int64)
        return slots_of(row.blocks_T[None], rows, positions, self._block_size)

    def _stage_states(self, rows: Sequence[DraftRow], states_NW: Tensor) -> None:
        """Of padding any state will do: nothing reads what comes of it."""
        chosen_N = np.zeros(self._key.num_tokens, np.int64)
        for index, row in enumerate(rows):
            begin = index * self._key.query
            chosen_N[begin : begin + len(row)] = row.states_n
        torch.index_select(states_NW, 0, torch.from_numpy(chosen_N), out=self.tensors[TARGET])
