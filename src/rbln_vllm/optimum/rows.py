# SPDX-License-Identifier: Apache-2.0
"""Run a batch of sequences through a compiled model, without an engine.

Every sequence has its own blocks from the start: nothing is shared, nothing is scheduled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer, kv_input_name
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import Executable
from rbln_vllm.worker.embed_programs import EmbedPrograms
from rbln_vllm.worker.embeddings import GivenEmbeds
from rbln_vllm.worker.inputs import (
    PADDING_BLOCK,
    PADDING_TOKEN,
    Integers,
    StepInputs,
    slots_of,
)
from rbln_vllm.worker.kv_memory import lazy_bytes
from rbln_vllm.worker.program_model import ProgramModel

Flags = NDArray[np.bool_]


class RowsCache:
    """Keys and values of a batch of sequences; what ``generate`` passes on as past_key_values.

    Room for ``tokens`` in each of ``rows`` sequences. ``lengths_B`` counts those that are there,
    ``columns`` the columns of input (padding among them) that they came from.
    """

    is_compileable = False
    """Asked by Transformers: whether torch.compile may see it."""

    def __init__(
        self, layers: Sequence[KVLayer], geometry: Geometry, rows: int, tokens: int
    ) -> None:
        per_row = -(-max(tokens, 1) // geometry.block_size)
        # Block 0 is where padding rows point.
        first = 1 + per_row * np.arange(rows)[:, None]
        self.block_table_BT = np.full(
            (rows, geometry.num_blocks_per_seq), PADDING_BLOCK, dtype=np.int64
        )
        self.block_table_BT[:, :per_row] = first + np.arange(per_row)
        self.room = per_row * geometry.block_size
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.columns = 0
        self.pool = {
            kv_input_name(index): _pool(layer, geometry.block_size, 1 + rows * per_row)
            for index, layer in enumerate(layers)
        }

    def get_seq_length(self, _layer: int = 0) -> int:
        """Columns of input that were seen; Transformers cuts off as many."""
        return self.columns


def _pool(layer: KVLayer, block_size: int, blocks: int) -> Tensor:
    shape = (blocks, *layer.block_shape(block_size))
    memory = lazy_bytes(prod(shape) * layer.torch_dtype.itemsize)
    return memory.view(layer.torch_dtype).view(shape)


@dataclass(frozen=True)
class AvailablePrograms:
    """Programs of an executable, of which none is ever compiled."""

    executable: Executable

    def ensure(self, key: ProgramKey) -> None:
        self.executable.load(key.name)


class RowsRunner:
    """Steps of a batch: prefill row by row in chunks, decode all rows at once."""

    def __init__(self, executable: Executable, geometry: Geometry) -> None:
        self._executable, self._geometry = executable, geometry
        self._table = geometry.table
        self._model = ProgramModel(geometry, AvailablePrograms(executable))
        self._embeds = EmbedPrograms(geometry.table, AvailablePrograms(executable))
        self._bound: RowsCache | None = None
        self._adapters_B: Integers | None = None

    def run(
        self,
        cache: RowsCache,
        ids_BS: Integers,
        present_BS: Flags,
        adapters_B: Integers | None = None,
    ) -> Tensor:
        """Append tokens to every sequence; logits ``[B, vocabulary]`` of the last one of each.

        ``present_BS`` is False where a column is padding, ``adapters_B`` the slot of each
        sequence's adapter. ValueError for a row without a token and for sequences that outgrow the
        cache.
        """
        rows = [_Tokens(ids_BS[row][present_BS[row]]) for row in range(len(ids_BS))]
        return self._run(cache, rows, ids_BS.shape[1], adapters_B)

    def run_embeds(self, cache: RowsCache, embeds_BSE: Tensor, present_BS: Flags) -> Tensor:
        """The same for embeddings in place of tokens."""
        present = torch.from_numpy(present_BS)
        given = [embeds_SE[here_S] for embeds_SE, here_S in zip(embeds_BSE, present, strict=True)]
        nothing = [np.full(len(embeds_NE), PADDING_TOKEN) for embeds_NE in given]
        rows = [_Tokens(ids_N, each) for ids_N, each in zip(nothing, given, strict=True)]
        return self._run(cache, rows, embeds_BSE.shape[1])

    def look_up(self, ids_N: Integers) -> Tensor:
        """Embeddings ``[N, E]`` of tokens, for a model that takes such."""
        parts = _chunks(ids_N, self._table.chunk)
        return torch.cat([self._embeds.look_up(part_N).clone() for _, part_N in parts])

    def _run(
        self,
        cache: RowsCache,
        rows: Sequence["_Tokens"],
        columns: int,
        adapters_B: Integers | None = None,
    ) -> Tensor:
        counts_B = np.array([len(row.ids_N) for row in rows])
        self._check(cache, counts_B)
        self._bind(cache)
        self._adapters_B = adapters_B
        one_each = counts_B.max() == 1 and all(row.embeds_NE is None for row in rows)
        if one_each and len(rows) <= self._table.decode_buckets[-1]:
            hidden_BH = self._decode(cache, np.concatenate([row.ids_N for row in rows]))
        else:
            last = [self._prefill_last(cache, place, row) for place, row in enumerate(rows)]
            hidden_BH = torch.stack(last)
        cache.lengths_B += counts_B
        cache.columns += columns
        return self._model.compute_logits(hidden_BH).clone()

    def hidden_states(self, cache: RowsCache, ids_N: Integers) -> Tensor:
        """``[N, hidden]`` of all tokens of one sequence, which is all that the cache will hold.

        ValueError for no token and for more than the cache has room for.
        """
        cache.lengths_B[:] = 0
        self._check(cache, np.array([len(ids_N)]))
        self._bind(cache)
        chunks = self._prefill(cache, 0, _Tokens(ids_N))
        return torch.cat([hidden_NH.clone() for hidden_NH in chunks])

    def _check(self, cache: RowsCache, counts_B: Integers) -> None:
        if len(counts_B) != len(cache.lengths_B):
            raise ValueError(
                f"the cache holds {len(cache.lengths_B)} sequences, and {len(counts_B)} were given"
            )
        if counts_B.min() < 1:
            raise ValueError(f"row {int(counts_B.argmin())} has no token that is not padding")
        longest = int((cache.lengths_B + counts_B).max())
        if longest > cache.room:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit the cache, which has room for "
                f"{cache.room}: generate with a new one"
            )

    def _bind(self, cache: RowsCache) -> None:
        if self._bound is not cache:
            self._executable.bind_kv(cache.pool)
            self._bound = cache

    def _decode(self, cache: RowsCache, ids_B: Integers) -> Tensor:
        rows = np.arange(len(ids_B))
        step = self._step(cache, rows, ids_B, cache.lengths_B)
        return self._model.run_step(self._table.decode_for(len(rows)), step).hidden_NH

    def _prefill_last(self, cache: RowsCache, row: int, tokens: "_Tokens") -> Tensor:
        """Hidden state ``[hidden]`` of the last token."""
        *_, hidden_NH = self._prefill(cache, row, tokens)
        return hidden_NH[-1].clone()

    def _prefill(self, cache: RowsCache, row: int, tokens: "_Tokens") -> Iterator[Tensor]:
        """Hidden states chunk by chunk, each valid until the next."""
        for first, part_N in _chunks(tokens.ids_N, self._table.chunk):
            positions_N = cache.lengths_B[row] + first + np.arange(len(part_N))
            step = self._step(cache, np.array([row]), part_N, positions_N)
            step = replace(step, embeds=tokens.given(first, len(part_N)))
            yield self._model.run_step(self._table.prefill, step).hidden_NH

    def _step(
        self, cache: RowsCache, rows: Integers, ids_N: Integers, positions_N: Integers
    ) -> StepInputs:
        """A step of these rows: a token of each, or all tokens of the one."""
        blocks_BT = cache.block_table_BT[rows]
        counts_B = np.full(len(rows), len(ids_N) // len(rows))
        owners_N = np.repeat(np.arange(len(rows)), counts_B)
        slots_N = slots_of(blocks_BT, owners_N, positions_N, self._geometry.block_size)
        adapters_B = self._adapters_B
        adapters_N = None if adapters_B is None else adapters_B[rows[owners_N]]
        return StepInputs(ids_N, positions_N, slots_N, counts_B, blocks_BT, adapters_N)


@dataclass(frozen=True)
class _Tokens:
    """Of one sequence; ``embeds_NE`` are given in place of ids, which then mean nothing."""

    ids_N: Integers
    embeds_NE: Tensor | None = None

    def given(self, first: int, count: int) -> GivenEmbeds | None:
        """The embeddings of so many tokens from ``first`` on."""
        if self.embeds_NE is None:
            return None
        return GivenEmbeds(np.arange(count), self.embeds_NE[first : first + count])


def _chunks(ids_N: Integers, size: int) -> Iterator[tuple[int, Integers]]:
    """(Place of the first token, tokens) of each chunk."""
    for first in range(0, len(ids_N), size):
        yield first, ids_N[first : first + size]
