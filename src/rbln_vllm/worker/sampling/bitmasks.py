# SPDX-License-Identifier: Apache-2.0
"""Bitmasks of grammars in the order of the batch: the scheduler sends them in its own."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput

from rbln_vllm.worker.sampling.programs import ALL_ALLOWED


def batch_bitmask(grammar: GrammarOutput, row_of: Mapping[str, int], rows: int) -> Tensor:
    """int32 ``[rows, words]``: the mask of each constrained request in its row, -1 elsewhere.

    A request that is not in the batch (any more) is left out.
    """
    masks_GW = torch.from_numpy(grammar.grammar_bitmask)
    bitmask_RW = torch.full((rows, masks_GW.shape[1]), ALL_ALLOWED, dtype=torch.int32)
    requests: Sequence[str] = grammar.structured_output_request_ids
    places = [(row_of[name], place) for place, name in enumerate(requests) if name in row_of]
    if places:
        targets, sources = (list(indices) for indices in zip(*places, strict=True))
        bitmask_RW[targets] = masks_GW[sources]
    return bitmask_RW
