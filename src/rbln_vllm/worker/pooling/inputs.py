# SPDX-License-Identifier: Apache-2.0
"""Staging of whole sequences into an encoder program: one after another, padding at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rbln_vllm.programs import ProgramKey
from rbln_vllm.worker.inputs import PADDING_TOKEN, Integers


@dataclass(frozen=True)
class EncoderInputs:
    """A step before padding: ``n`` tokens of whole sequences with ``lengths_B`` tokens each.

    ``token_types_N`` are the segments of a pair, 0 where there is no pair. Integers of any width.
    """

    input_ids_N: Integers
    token_types_N: Integers
    lengths_B: Integers

    def __post_init__(self) -> None:
        tokens = len(self.input_ids_N)
        if len(self.token_types_N) != tokens or int(self.lengths_B.sum()) != tokens:
            raise ValueError("a step needs a segment for every token, and a length for all")

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_N)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_B)


def encoder_step(
    prompts: Sequence[Sequence[int]], second_segments: Sequence[int | None]
) -> EncoderInputs:
    """Whole sequences, one after another.

    ``second_segments`` has for each pair of texts at which token the second begins; None where
    there is no pair.
    """
    lengths_B = np.fromiter(map(len, prompts), np.int32, len(prompts))
    tokens = int(lengths_B.sum())
    ids_N = np.fromiter(chain.from_iterable(prompts), np.int32, tokens)
    types_N = np.zeros(tokens, np.int32)
    for start, end, second in zip(
        (np.cumsum(lengths_B) - lengths_B).tolist(),
        np.cumsum(lengths_B).tolist(),
        second_segments,
        strict=True,
    ):
        if second is not None:
            types_N[start + second : end] = 1
    return EncoderInputs(ids_N, types_N, lengths_B)


def places(lengths_B: Integers) -> tuple[Integers, Integers]:
    """Of each token its sequence and its position in it, int64 ``[n]``."""
    rows_N = np.repeat(np.arange(len(lengths_B)), lengths_B)
    first_B = np.cumsum(lengths_B) - lengths_B
    return rows_N, np.arange(len(rows_N)) - first_B[rows_N]


class StagedEncoder:
    """The input buffers of one encoder program. Padding is written on every step."""

    def __init__(self, key: ProgramKey) -> None:
        self.key = key
        tokens = key.num_tokens
        self.tensors = {
            "input_ids": torch.zeros(tokens, dtype=torch.int32),
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "token_types": torch.zeros(tokens, dtype=torch.int32),
            "row_starts": torch.zeros(key.batch + 1, dtype=torch.int32),
        }
        """By the names of the program's inputs."""
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def stage(self, step: EncoderInputs) -> dict[str, Tensor]:
        """Copy a step in and pad the rest. ValueError for a step that does not fit."""
        tokens, sequences = step.num_tokens, step.num_sequences
        if tokens > self.key.num_tokens or sequences > self.key.batch:
            raise ValueError(
                f"{tokens} tokens of {sequences} sequences do not fit program {self.key.name}"
            )
        arrays = self._arrays
        _fill(arrays["input_ids"], step.input_ids_N, PADDING_TOKEN)
        _fill(arrays["positions"], places(step.lengths_B)[1], 0)
        _fill(arrays["token_types"], step.token_types_N, 0)
        # Rows of padding are empty: they begin and end where the last sequence ends.
        _fill(arrays["row_starts"][1:], np.cumsum(step.lengths_B), tokens)
        return self.tensors


def _fill(buffer: Integers, values: Integers, padding: int) -> None:
    buffer[: len(values)] = values
    buffer[len(values) :] = padding
