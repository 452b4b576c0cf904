# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as a table of all positions, where models compute angles in every step.

The table holds what the model's own module says of each position, rounded as it rounds.
"""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

BY_LENGTH = ("dynamic", "longrope")
"""Rotary types whose angles depend on the longest sequence of a batch."""


class RotaryTable(torch.nn.Module):
    """Cosines and sines of a position: a row of ``cos_sin_PR``, one angle of each of R / 2.

    ``twice`` gives every angle once for each half of a head, as most models want them.
    """

    cos_sin_PR: Tensor

    def __init__(self, cos_sin_PR: Tensor, *, twice: bool) -> None:
        super().__init__()
        self.register_buffer("cos_sin_PR", cos_sin_PR, persistent=False)
        self._twice = twice

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[1, N, R]`` each (or ``R / 2``) for positions ``[1, N]``."""
        cos_NA, sin_NA = self.cos_sin_PR.index_select(0, position_ids[0]).chunk(2, dim=-1)
        if self._twice:
            cos_NA, sin_NA = (torch.cat((half, half), dim=-1) for half in (cos_NA, sin_NA))
        return cos_NA[None], sin_NA[None]


def tabulate_rotary(model: PreTrainedModel, positions: int, dtype: torch.dtype) -> None:
    """Replace the rotary modules of ``model`` by tables of this many positions.

    Raises NotImplementedError for angles that depend on the length of other sequences.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_rotary(child):
                setattr(parent, name, _table(child, positions, dtype))


def _is_rotary(module: torch.nn.Module) -> bool:
    """Whether it makes cosines and sines of positions alone."""
    if not hasattr(module, "inv_freq"):
        return False
    return list(inspect.signature(type(module).forward).parameters) == ["self", "x", "position_ids"]


@torch.inference_mode()
def _table(module: torch.nn.Module, positions: int, dtype: torch.dtype) -> torch.nn.Module:
    kind = getattr(module, "rope_type", "default")
    if kind in BY_LENGTH:
        raise NotImplementedError(
            f"rotary embeddings of type {kind!r} depend on the longest sequence of a batch, which "
            "is not built yet: use a model or --hf-overrides without it, or --model-impl vllm"
        )
    # Two at least: at position 0 alone all cosines are the same.
    places_1P = torch.arange(max(positions, 2))[None]
    cos_1PR, sin_1PR = module(torch.empty(0, dtype=dtype), places_1P)
    angles = cos_1PR.shape[-1] // 2
    twice = all(torch.equal(t[..., :angles], t[..., angles:]) for t in (cos_1PR, sin_1PR))
    cos_PA, sin_PA = (t[0, :, :angles] if twice else t[0] for t in (cos_1PR, sin_1PR))
    return RotaryTable(torch.cat((cos_PA, sin_PA), dim=-1).clone(), twice=twice)
