# SPDX-License-Identifier: Apache-2.0
"""What a draw depends on beside its logits: the request's seed, and how long its output is.

The number of a draw is a function of both alone, so a seed gives the same tokens in any batch,
bucket and row, and again after a preemption.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.integer]
_WORD = (1 << 64) - 1


class BatchRows(Protocol):
    """What is read of vLLM's ``InputBatch``: the rows of the step."""

    num_tokens_no_spec: npt.NDArray[np.int32]
    num_prompt_tokens: npt.NDArray[np.int32]

    @property
    def req_ids(self) -> list[str]: ...


class DrawKeys:
    """Seeds of all requests that are known, and the positions of the step's rows.

    A request without a seed of its own gets one when it is first seen, from a generator seeded by
    the engine's seed. ``requests`` is vLLM's own mapping of the worker's requests, ``rows`` gives
    the batch.
    """

    def __init__(
        self, requests: Mapping[str, Any], rows: Callable[[], BatchRows], engine_seed: int
    ) -> None:
        self._requests, self._rows = requests, rows
        self._seeds: dict[str, int] = {}
        self._ahead = 0
        self._generator = torch.Generator().manual_seed(engine_seed)

    def of_step(self, counts_B: Integers | None = None) -> tuple[Tensor, Tensor]:
        """Seed and position in the output of each row's next token, int64 ``[R]`` each.

        With ``counts_B``, of that many tokens after one another of each request. Inside of
        :meth:`looking_ahead` all positions are later by so much.
        """
        seed_B, position_B = self._of_requests()
        if counts_B is None:
            return torch.from_numpy(seed_B), torch.from_numpy(position_B)
        first_B = np.cumsum(counts_B) - counts_B
        position_R = np.repeat(position_B - first_B, counts_B) + np.arange(counts_B.sum())
        return torch.from_numpy(np.repeat(seed_B, counts_B)), torch.from_numpy(position_R)

    @contextmanager
    def looking_ahead(self, tokens: int) -> Iterator[None]:
        """Draw for the positions that come ``tokens`` after the next."""
        self._ahead = tokens
        try:
            yield
        finally:
            self._ahead = 0

    def _of_requests(self) -> tuple[Integers, Integers]:
        rows = self._rows()
        ids = rows.req_ids
        count = len(ids)
        if not self._seeds.keys() >= set(ids):
            self._meet()
        seed_B = np.array([self._seeds[request] for request in ids], dtype=np.int64)
        position_B = rows.num_tokens_no_spec[:count] - rows.num_prompt_tokens[:count]
        return seed_B, position_B.astype(np.int64) + self._ahead

    def _meet(self) -> None:
        """Give new requests a seed and forget those that are gone."""
        self._seeds = {
            name: self._seeds[name] if name in self._seeds else self._seed_of(state)
            for name, state in self._requests.items()
        }

    def _seed_of(self, state: Any) -> int:
        own = state.sampling_params.seed if state.sampling_params is not None else None
        if own is not None:
            return signed(own)
        return int(torch.randint(1 << 62, (), generator=self._generator))


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    word = value & _WORD
    return word - (1 << 64) if word >> 63 else word


def mixed(seed: int, position: int) -> int:
    """63 bits for a generator that serves one draw.

    SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) over the seed, advanced by the position.
    """
    word = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return (word ^ word >> 31) >> 1
