# SPDX-License-Identifier: Apache-2.0
"""What a drafter's programs are captured from, whatever kind of model drafts."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from rbln_vllm.models.kv_layers import KVLayer


class DraftNetwork(Protocol):
    """A model that guesses the next token of a sequence that another model writes."""

    kv_layers: tuple[KVLayer, ...]
    """Its attention layers, which share the pool with the target's; none for a drafter that keeps
    nothing of the sequence."""
    target_width: int
    """W, the elements of the target's hidden states that are read beside each token; 0 for none.
    """
    dtype: torch.dtype
    """Of those states."""

    @property
    def module(self) -> torch.nn.Module:
        """Holds every weight that the methods read."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Around whatever calls the methods below."""
        ...

    def combined(self, target_NW: Tensor) -> Tensor:
        """The target's states as a pass takes them, ``[N, H]``."""
        ...

    def forward(self, inputs: dict[str, Tensor], carried_NH: Tensor | None) -> tuple[Tensor, ...]:
        """One pass over ``N`` tokens: states ``[N, H]`` for ``tokens``, then those that the next
        pass carries on, if they are others.

        ``inputs`` are those of a target's forward program, by name. ``carried_NH`` comes from
        ``combined``, or from the pass before; None where ``target_width`` is 0.
        """
        ...

    def tokens(self, states_BH: Tensor) -> Tensor:
        """The token each row likes best, in the target's vocabulary, int64 ``[B]``."""
        ...


class MedusaNetwork(Protocol):
    """Heads that guess several tokens at once, each from the target's last hidden state."""

    target_width: int
    dtype: torch.dtype

    @property
    def module(self) -> torch.nn.Module: ...

    def capturing(self) -> AbstractContextManager[None]: ...

    def drafts(self, target_BW: Tensor) -> Tensor:
        """A guess of each head, int64 ``[B, heads]``, in the order of the text."""
        ...
