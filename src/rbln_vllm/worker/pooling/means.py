# SPDX-License-Identifier: Apache-2.0
"""Mean pooling of rows that lie one after another."""

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.pooler.seqwise.methods import MeanPool
from vllm.v1.pool.metadata import PoolingMetadata


class RowMeans(MeanPool):
    """vLLM's mean pooling, row by row.

    Upstream adds token by token into a tensor of sums, which takes milliseconds per thousand
    tokens. A row's mean here is one reduction over its own tokens, in fp32, so that it does not
    depend on other rows either.
    """

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Tensor:
        """Means, fp32 ``[rows, hidden]``. RuntimeError for a prompt that is there in part."""
        cursor = pooling_metadata.get_pooling_cursor()
        if cursor.is_partial_prefill():
            raise RuntimeError("partial prefill is not supported with MEAN pooling")
        return row_means(hidden_states, cursor.prompt_lens_cpu.tolist())


def row_means(hidden_NH: Tensor, lengths_B: list[int]) -> Tensor:
    """The mean of each of the rows, fp32 ``[B, hidden]``; they have so many tokens, in order."""
    hidden = hidden_NH.to(torch.float32).numpy()
    means = np.empty((len(lengths_B), hidden.shape[1]), dtype=np.float32)
    edges = pairwise(accumulate(lengths_B, initial=0))
    for mean, (start, end) in zip(means, edges, strict=True):
        np.mean(hidden[start:end], axis=0, out=mean)
    return torch.from_numpy(means)
