# SPDX-License-Identifier: Apache-2.0
"""Bitmasks of grammars in the order of the batch: the scheduler sends them in its own."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput

from rbln_vllm.worker.sampling.programs import ALL_ALLOWED

NO_DRAFTS: Mapping[str, int] = MappingProxyType({})


def batch_bitmask(
    grammar: GrammarOutput,
    row_of: Mapping[str, int],
    rows: int,
    count_of: Mapping[str, int] = NO_DRAFTS,
) -> Tensor:
    """int32 ``[rows, words]``: the masks of each constrained request in its rows, -1 elsewhere.

    A request has ``count_of`` masks, of its next token and of one after each draft, or else one;
    they go to the rows from ``row_of`` on. A request that is not in the batch (any more) is left
    out.
    """
    masks_GW = grammar.grammar_bitmask
    bitmask_RW = np.full((rows, masks_GW.shape[1]), ALL_ALLOWED, dtype=np.int32)
    names: Sequence[str] = grammar.structured_output_request_ids
    targets: list[int] = []
    sources: list[int] = []
    next_mask = 0
    for name in names:
        count = count_of.get(name, 1)
        if name in row_of:
            targets.extend(range(row_of[name], row_of[name] + count))
            sources.extend(range(next_mask, next_mask + count))
        next_mask += count
    if targets:
        bitmask_RW[targets] = masks_GW[sources]
    return torch.from_numpy(bitmask_RW)
