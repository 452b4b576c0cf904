# SPDX-License-Identifier: Apache-2.0
"""Embeddings that requests give in place of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch


@dataclass(frozen=True)
class GivenEmbeds:
    """``embeds_KE`` are the embeddings of a step's tokens at ``places_K``; the other tokens' are
    looked up."""

    places_K: NDArray[np.integer]
    embeds_KE: Tensor

    def __post_init__(self) -> None:
        if len(self.places_K) != len(self.embeds_KE):
            raise ValueError(
                f"{len(self.embeds_KE)} embeddings are given for {len(self.places_K)} tokens"
            )

    def fill(self, embeds_NE: Tensor) -> None:
        """Write them among the embeddings of all tokens of the step."""
        embeds_NE[torch.from_numpy(self.places_K)] = self.embeds_KE.to(embeds_NE.dtype)


def given_embeds(
    batch: "InputBatch", rows_N: NDArray[np.integer], positions_N: NDArray[np.integer]
) -> GivenEmbeds | None:
    """Those of vLLM's batch that a step reads, by sequence and position of its tokens."""
    if not batch.req_prompt_embeds:
        return None
    (places_K,) = np.nonzero(~batch.is_token_ids[rows_N, positions_N])
    if not len(places_K):
        return None
    pairs = zip(rows_N[places_K].tolist(), positions_N[places_K].tolist(), strict=True)
    return GivenEmbeds(places_K, _stacked(batch, list(pairs)))


def _stacked(batch: "InputBatch", pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.stack([batch.req_prompt_embeds[row][position] for row, position in pairs])
