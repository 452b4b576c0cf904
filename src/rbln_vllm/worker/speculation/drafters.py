# SPDX-License-Identifier: Apache-2.0
"""What guesses the tokens that the next step verifies, and what it is told of the step before.

A drafter is called once a step, after verification, with everything it may need; it never looks
into the runner. Its drafts are deterministic guesses: verification takes each as certain
(see verify.py), so nothing is asked about probabilities.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rbln_vllm.core.kv_cache.copies import KVCopy
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.worker.inputs import StepInputs

Integers = NDArray[np.integer]


@dataclass(frozen=True)
class DraftStep:
    """A step that has been verified: ``B`` rows in the order of the batch, ``N`` tokens.

    A row of a decode step has computed its last token and ``d`` drafts (``d`` may be 0), the one
    row of a prefill step a chunk of its prompt.
    """

    request_ids: tuple[str, ...]
    inputs: StepInputs
    """What the step computed, without padding: ids, positions and slots ``[N]``, ``counts_B``
    tokens of each row, block table ``[B, T]``. Drafts that were rejected are among them."""
    sampled_B: Sequence[Sequence[int]]
    """The new tokens of each row: accepted drafts, then the one the target chose. Empty where the
    prompt goes on; such a row gets no drafts, but its tokens may fill the drafter's own KV."""
    tokens_BL: Integers
    """All known tokens of each row, new ones too; valid up to ``lengths_B``. A view: read only."""
    lengths_B: Integers
    """Known tokens of each row: prompt and output, of a prefill also those not computed yet."""
    hidden_NH: Tensor | None = None
    """The target's hidden states of ``inputs``, valid until its next forward program runs."""
    aux_NH: Tensor | None = None
    """Its auxiliary hidden states, concatenated, where the forward program returns some."""

    def __post_init__(self) -> None:
        rows = len(self.request_ids)
        sizes = {len(self.sampled_B), len(self.tokens_BL), len(self.lengths_B)}
        if sizes != {rows} or self.inputs.num_sequences != rows:
            raise ValueError(f"a step of {rows} rows needs as many of everything")

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def counts_B(self) -> Integers:  # noqa: N802 (a tensor's name ends in its axes)
        """The tokens of each row in ``inputs``; they sum to N."""
        return self.inputs.counts_B

    @property
    def row_offsets(self) -> Integers:
        """Where each row's tokens begin in N, ``[B]``."""
        starts_B: Integers = np.cumsum(self.counts_B) - self.counts_B
        return starts_B

    @property
    def first_positions(self) -> Integers:
        """The position of each row's first token in ``inputs``, ``[B]``."""
        return self.inputs.positions_N[self.row_offsets]

    @property
    def kept_counts(self) -> Integers:
        """How many of each row's tokens in ``inputs`` stand, from its first on, ``[B]``: all of a
        prompt's, else one for each new token. What follows them are rejected drafts.
        """
        kept_B: Integers = np.minimum(self.counts_B, self.lengths_B - 1 - self.first_positions)
        return kept_B

    @property
    def next_tokens(self) -> Integers:
        """The token after each row's last one that stands, ``[B]``: the target's choice, or where
        the prompt goes on, the prompt's."""
        rows_B = np.arange(self.num_rows)
        next_B: Integers = self.tokens_BL[rows_B, self.first_positions + self.kept_counts]
        return next_B


class Drafter(Protocol):
    """Guesses tokens. Calls come in this order: ``load``, ``bind_kv``, ``warm_up``, then any
    number of ``propose``, ``copy_kv`` and ``forget``."""

    num_speculative_tokens: int
    """K, the most drafts of a row."""
    kv_layers: tuple[KVLayer, ...]
    """What it keeps in the KV pool beside the target's layers, with the target's block table and
    slots; known once it is loaded. vLLM reserves K slots beyond a request's tokens for methods
    that write drafts' KV (``VllmConfig.num_lookahead_tokens``)."""

    def load(self) -> None:
        """Make its programs available: compile them, or load them from the cache."""
        ...

    def bind_kv(self, layers: Mapping[str, Tensor]) -> None:
        """Take the pool of each of ``kv_layers``, by name,
        ``[num_blocks, num_kv_heads, block_size, width]``."""
        ...

    def warm_up(self) -> None:
        """Run every program once, on nothing but padding."""
        ...

    def copy_kv(self, copies: Sequence[KVCopy]) -> None:
        """Carry out the copies between blocks that come before a step."""
        ...

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Drafts for each row, at most K; none where a row has no new token.

        Nothing may be written at or beyond the position ``max_model_len``. Raises
        MissingProgramError when a program may not be compiled now.
        """
        ...

    def forget(self, request_ids: Collection[str]) -> None:
        """These requests have ended."""
        ...


class HostDrafter:
    """The part of a drafter that has no programs and no KV."""

    kv_layers: tuple[KVLayer, ...] = ()

    def load(self) -> None:
        return None

    def bind_kv(self, layers: Mapping[str, Tensor]) -> None:
        return None

    def warm_up(self) -> None:
        return None

    def copy_kv(self, copies: Sequence[KVCopy]) -> None:
        return None

    def forget(self, request_ids: Collection[str]) -> None:
        return None
