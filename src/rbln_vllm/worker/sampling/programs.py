# SPDX-License-Identifier: Apache-2.0
"""The sampler programs and their input buffers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rbln_vllm.programs import ProgramKey, ProgramTable, Role
from rbln_vllm.toolchain import PADDING_ROW
from rbln_vllm.worker.program_store import ProgramStore

ALL_ALLOWED = -1
"""A word of a bitmask."""
OFF = 0
"""As a top-k."""


@dataclass(frozen=True)
class Draws:
    """The parameters of a step's rows, all ``[R]``.

    ``temperature_R`` fp32, 0 is greedy; ``top_k_R`` int32, 0 is off; ``top_p_R`` fp32, 1 is off;
    ``seed_R`` and ``position_R`` int64.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    seed_R: Tensor
    position_R: Tensor

    @property
    def rows(self) -> int:
        return self.seed_R.shape[0]

    @classmethod
    def greedy(cls, rows: int) -> "Draws":
        """Every row takes its largest logit."""
        numbers = torch.zeros(rows)
        integers = torch.zeros(rows, dtype=torch.int64)
        return cls(numbers, integers.int(), numbers + 1, integers, integers)


class SamplerPrograms:
    """Runs sampler programs on logits of any number of rows that a step can have."""

    def __init__(self, table: ProgramTable, store: ProgramStore) -> None:
        self._table, self._store = table, store
        self._staged: dict[ProgramKey, _StagedRows] = {}

    def sample(
        self, logits_RV: Tensor, draws: Draws, bitmask_RW: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[R]``, of those that ``bitmask_RW`` allows, and the least logit of each
        row, after temperature, that could be drawn, fp32 ``[R]``.

        Both are the program's own buffers, valid until its next run. Raises MissingProgramError.
        """
        staged = self._staged_rows(Role.SAMPLER, logits_RV, draws.rows)
        staged.allow(bitmask_RW)
        return self._drawn(staged, logits_RV, draws)

    def draw(self, logits_RV: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The same from fp32 logits that vLLM has processed."""
        return self._drawn(self._staged_rows(Role.DRAW, logits_RV, draws.rows), logits_RV, draws)

    def mask(self, logits_RV: Tensor, bitmask_RW: Tensor) -> None:
        """Set the logits of tokens that ``bitmask_RW`` forbids to -infinity, in place."""
        rows = logits_RV.shape[0]
        staged = self._staged_rows(Role.MASK, logits_RV, rows)
        staged.allow(bitmask_RW)
        padded_BV = staged.padded(logits_RV)
        self._run(staged, padded_BV, rows)
        if padded_BV.data_ptr() != logits_RV.data_ptr():
            logits_RV.copy_(padded_BV[:rows])

    def _staged_rows(self, role: Role, logits_RV: Tensor, rows: int) -> "_StagedRows":
        key = self._table.sampler_for(role, rows)
        self._store.ensure(key)
        if key not in self._staged:
            self._staged[key] = _StagedRows(key, logits_RV)
        return self._staged[key]

    def _drawn(
        self, staged: "_StagedRows", logits_RV: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        staged.stage(draws)
        rows = draws.rows
        token_B, threshold_B = self._run(staged, staged.padded(logits_RV), rows)
        return token_B[:rows], threshold_B[:rows]

    def _run(self, staged: "_StagedRows", padded_BV: Tensor, rows: int) -> tuple[Tensor, ...]:
        inputs = {"logits": padded_BV, **staged.tensors}
        return self._store.executable.run(staged.key.name, inputs, rows)


class _StagedRows:
    """The input buffers of one sampler program. Rows of padding are written on every step."""

    def __init__(self, key: ProgramKey, logits_RV: Tensor) -> None:
        self.key = key
        vocab_size = logits_RV.shape[1]
        self._logits_BV = logits_RV.new_zeros(0, vocab_size)
        self.tensors = {} if key.role is Role.MASK else _parameters(key.batch)
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self._is_masked = False
        self._in_place: tuple[int, Tensor] | None = None
        if key.role is not Role.DRAW:
            words = -(-vocab_size // 32)
            mask_BW = np.full((key.batch, words), ALL_ALLOWED, dtype=np.int32)
            self._arrays["bitmask"], self.tensors["bitmask"] = mask_BW, torch.from_numpy(mask_BW)

    def stage(self, draws: Draws) -> None:
        """Copy a step's parameters in and pad the rest."""
        _fill(self._arrays["temperature"], draws.temperature_R, 0)
        _fill(self._arrays["top_k"], draws.top_k_R, OFF)
        _fill(self._arrays["top_p"], draws.top_p_R, 1)
        _fill(self._arrays["seed"], draws.seed_R, 0)
        _fill(self._arrays["position"], draws.position_R, PADDING_ROW)

    def allow(self, bitmask_RW: Tensor | None) -> None:
        """Copy a bitmask in; without one every token is allowed."""
        mask_BW = self._arrays["bitmask"]
        if bitmask_RW is not None:
            _fill(mask_BW, bitmask_RW[:, : mask_BW.shape[1]], ALL_ALLOWED)
        elif self._is_masked:
            mask_BW[:] = ALL_ALLOWED
        self._is_masked = bitmask_RW is not None

    def padded(self, logits_RV: Tensor) -> Tensor:
        """The logits with the program's number of rows: they themselves where they have it, or
        are the first rows of a buffer that does (a logits program's is)."""
        rows, vocab_size = logits_RV.shape
        pointer = logits_RV.data_ptr()
        if self._in_place is not None and self._in_place[0] == pointer:
            return self._in_place[1]
        if logits_RV.is_contiguous() and _reach(logits_RV) >= self.key.batch * vocab_size:
            whole_BV = logits_RV.as_strided((self.key.batch, vocab_size), (vocab_size, 1))
            self._in_place = (pointer, whole_BV)
            return whole_BV
        if not self._logits_BV.shape[0]:
            self._logits_BV = logits_RV.new_zeros(self.key.batch, vocab_size)
        self._logits_BV[:rows] = logits_RV
        return self._logits_BV


def _parameters(batch: int) -> dict[str, Tensor]:
    """Of rows of padding."""
    return {
        "temperature": torch.zeros(batch),
        "top_k": torch.zeros(batch, dtype=torch.int32),
        "top_p": torch.ones(batch),
        "seed": torch.zeros(batch, dtype=torch.int64),
        "position": torch.full((batch,), PADDING_ROW),
    }


def _reach(tensor: Tensor) -> int:
    """Elements of the tensor's memory from its first on."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset())


def _fill(buffer: npt.NDArray[Any], values: Tensor, padding: int) -> None:
    """Through numpy, which takes a fifth of torch's time for few numbers, and for many does not
    wait for torch's threads to get a CPU."""
    rows = values.shape[0]
    buffer[:rows] = values.numpy()
    buffer[rows:] = padding
