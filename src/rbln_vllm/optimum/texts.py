# SPDX-License-Identifier: Apache-2.0
"""Run texts through a compiled pooling model, without an engine.

A text is a sequence of tokens of which every hidden state is wanted. Encoders take several in one
step; decoders read one after another, in chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.optimum.rows import AvailablePrograms, RowsCache, RowsRunner
from rbln_vllm.toolchain import Executable
from rbln_vllm.worker.inputs import Integers
from rbln_vllm.worker.pooling.inputs import EncoderInputs
from rbln_vllm.worker.pooling.programs import PoolingPrograms


@dataclass(frozen=True)
class Text:
    """Token ids, and of each token the segment of a pair that it belongs to."""

    ids_N: Integers
    types_N: Integers

    def __post_init__(self) -> None:
        if not len(self.ids_N):
            raise ValueError("a row has no token that is not padding")
        if len(self.ids_N) != len(self.types_N):
            raise ValueError("a text needs a segment for every token")

    def __len__(self) -> int:
        return len(self.ids_N)


class TextRunner(Protocol):
    """Computes the hidden states of texts."""

    def hidden_states(self, texts: Sequence[Text]) -> list[Tensor]:
        """``[n, hidden]`` of each text. ValueError for one that is too long."""
        ...


class EncoderTexts:
    """Of an encoder: as many texts in a step as its programs hold."""

    def __init__(self, executable: Executable, geometry: Geometry) -> None:
        self._geometry = geometry
        self._programs = PoolingPrograms(geometry, AvailablePrograms(executable))

    def hidden_states(self, texts: Sequence[Text]) -> list[Tensor]:
        lengths = [len(text) for text in texts]
        assert self._geometry.pooling is not None
        most = (self._geometry.max_num_seqs, self._geometry.pooling.step_tokens)
        return [
            hidden_NH
            for first, last in steps_of(lengths, *most)
            for hidden_NH in self._step(texts[first:last])
        ]

    def _step(self, texts: Sequence[Text]) -> tuple[Tensor, ...]:
        lengths = [len(text) for text in texts]
        step = EncoderInputs(
            np.concatenate([text.ids_N for text in texts]),
            np.concatenate([text.types_N for text in texts]),
            np.array(lengths),
        )
        parts: tuple[Tensor, ...] = self._programs.run_encoder(step).clone().split(lengths)
        return parts


class DecoderTexts:
    """Of a decoder: one text after another, through a cache that holds one of them."""

    def __init__(
        self, executable: Executable, geometry: Geometry, layers: Sequence[KVLayer]
    ) -> None:
        self._runner = RowsRunner(executable, geometry)
        self._cache = RowsCache(layers, geometry, rows=1, tokens=geometry.max_model_len)

    def hidden_states(self, texts: Sequence[Text]) -> list[Tensor]:
        return [self._runner.hidden_states(self._cache, text.ids_N) for text in texts]


class ClassifierRows:
    """The classifier's programs, for any number of rows."""

    def __init__(self, executable: Executable, geometry: Geometry) -> None:
        self._programs = PoolingPrograms(geometry, AvailablePrograms(executable))
        self._most = geometry.decode_buckets[-1]
        first = geometry.table.programs[-1]
        self._dtype = executable.load(first.name).graph.inputs["hidden"].dtype

    def logits(self, pooled_RH: Tensor) -> Tensor:
        """``[R, labels]``."""
        parts = pooled_RH.to(self._dtype).split(self._most)
        return torch.cat([self._programs.classify_rows(part_BH) for part_BH in parts])


def steps_of(
    lengths: Sequence[int], most_texts: int, most_tokens: int
) -> Iterator[tuple[int, int]]:
    """First and end of each step: texts in their order, as many as fit into it."""
    first = tokens = 0
    for place, length in enumerate(lengths):
        if place - first == most_texts or (place > first and tokens + length > most_tokens):
            yield first, place
            first, tokens = place, 0
        tokens += length
    if first < len(lengths):
        yield first, len(lengths)
