# SPDX-License-Identifier: Apache-2.0
"""``rbln::paged_attention``: causal attention of new queries over the paged KV pool, and
``rbln::encoder_attention``: attention in both directions among the tokens of a row, without a pool.

The former serves prefill (one sequence, Q queries) and decode (B sequences, one query each):
queries come as a ``[B * Q]`` grid and each carries its own position. The rows of the latter have
any length and follow each other.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rbln_host.ops.library import define

FEW_QUERIES = 8
"""Up to this many queries plain matrix products are faster than torch's fused attention (one
query, 300 keys, 9 heads: 0.1 ms against 0.35)."""

PADDING_POSITION = -1
"""Query rows at this position are padding: their output is zero and they read nothing."""


@define(
    "paged_attention(Tensor query_NHD, Tensor kv_cache, Tensor block_table_BT, "
    "Tensor query_pos_N, float scale, int window, float soft_cap, Tensor? sinks_H, "
    "Tensor? alibi_slopes_H) -> Tensor",
    meta=lambda query_NHD, *_args, **_kwargs: torch.empty_like(
        query_NHD, memory_format=torch.contiguous_format
    ),
)
def paged_attention(  # noqa: PLR0917 (an operator's arguments are positional)
    query_NHD: Tensor,
    kv_cache: Tensor,
    block_table_BT: Tensor,
    query_pos_N: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks_H: Tensor | None,
    alibi_slopes_H: Tensor | None,
) -> Tensor:
    """Attend from each query to the keys at positions ``(pos - window, pos]`` of its sequence.

    Shapes: ``query_NHD`` ``[B * Q, num_heads, head_size]``; ``kv_cache``
    ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; ``block_table_BT`` ``[B, T]`` block
    ids; ``query_pos_N`` ``[B * Q]``, ``PADDING_POSITION`` for padding. ``window`` 0 means all
    earlier positions. ``soft_cap`` 0 means none; otherwise scores become
    ``soft_cap * tanh(score / soft_cap)``. ``sinks_H`` adds one logit per head to the softmax's
    denominator (Xiao et al., StreamingLLM, as used by gpt-oss). ``alibi_slopes_H`` adds
    ``slope * (key_pos - query_pos)`` to the scores (Press et al.).

    Sequences are computed one by one, so a row's result does not depend on its neighbours.
    Blocks that hold no visible key are not read: the table may name any block there.
    """
    batch = block_table_BT.shape[0]
    queries = query_NHD.shape[0] // batch
    rules = _Rules(scale, window, soft_cap, sinks_H, alibi_slopes_H)
    output_NHD = torch.zeros_like(query_NHD, memory_format=torch.contiguous_format)
    for row, positions in enumerate(query_pos_N.view(batch, queries).tolist()):
        real = [i for i, position in enumerate(positions) if position >= 0]
        if not real:
            continue
        query_pos_Q = torch.tensor([positions[i] for i in real])
        first = max(0, int(query_pos_Q.min()) - window + 1) if window else 0
        key_pos_L = torch.arange(first, int(query_pos_Q.max()) + 1)
        key_HLD, value_HLD = _gather(kv_cache, block_table_BT[row], key_pos_L)
        index = torch.tensor([row * queries + i for i in real])
        query_HQD = query_NHD[index].transpose(0, 1)
        distance_QL = key_pos_L[None, :] - query_pos_Q[:, None]
        output_HQD = _attend(query_HQD, key_HLD, value_HLD, distance_QL, rules)
        output_NHD[index] = output_HQD.transpose(0, 1)
    return output_NHD


@define(
    "encoder_attention(Tensor query_NHD, Tensor key_NHD, Tensor value_NHD, Tensor row_starts_S, "
    "float scale) -> Tensor",
    meta=lambda query_NHD, *_args, **_kwargs: torch.empty_like(
        query_NHD, memory_format=torch.contiguous_format
    ),
)
def encoder_attention(
    query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, row_starts_S: Tensor, scale: float
) -> Tensor:
    """Attend from each token to every token of its own row.

    Shapes: ``query_NHD`` ``[N, num_heads, head_size]``, ``key_NHD`` and ``value_NHD``
    ``[N, num_kv_heads, head_size]``; ``row_starts_S`` int32 or int64 ``[rows + 1]``: row ``r`` has
    the tokens ``[row_starts[r], row_starts[r + 1])`` and may be empty. Tokens of no row are
    padding: their output is zero and nobody reads them. Raises IndexError for starts that descend
    or lie outside the tokens.

    Rows are computed one by one, so a row's result does not depend on its neighbours.
    """
    starts = row_starts_S.tolist()
    rules = _Rules(scale, 0, 0.0, None, None)
    output_NHD = torch.zeros_like(query_NHD, memory_format=torch.contiguous_format)
    for start in starts:
        if not 0 <= start <= query_NHD.shape[0]:
            raise IndexError(f"row start {start} is before another's or outside the tokens")
    for start, end in pairwise(starts):
        if end < start:
            raise IndexError(f"row start {end} is before another's or outside the tokens")
        if end == start:
            continue
        q_HQD, k_HLD, v_HLD = (
            tensor[start:end].transpose(0, 1) for tensor in (query_NHD, key_NHD, value_NHD)
        )
        all_visible_QL = torch.zeros(end - start, end - start)
        output_NHD[start:end] = _attend(q_HQD, k_HLD, v_HLD, all_visible_QL, rules).transpose(0, 1)
    return output_NHD


class _Rules(NamedTuple):
    """What changes the scores, as in :func:`paged_attention`."""

    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def changes_scores(self) -> bool:
        """Whether scores are changed in a way that fused kernels do not offer."""
        return bool(self.soft_cap) or self.sinks is not None or self.alibi_slopes is not None


def _gather(kv_cache: Tensor, blocks_T: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at consecutive positions, each ``[num_kv_heads, L, head_size]``."""
    _, heads, block_size, pair = kv_cache.shape
    first, end = int(positions_L[0]), int(positions_L[-1]) + 1
    start_block = first // block_size
    needed = blocks_T[start_block : -(-end // block_size)].long()
    pair_HLD = kv_cache[needed].transpose(0, 1).reshape(heads, -1, pair)
    skip = first - start_block * block_size
    key_HLD, value_HLD = pair_HLD[:, skip : skip + end - first].chunk(2, dim=-1)
    return key_HLD, value_HLD


def _attend(
    query_HQD: Tensor, key_HLD: Tensor, value_HLD: Tensor, distance_QL: Tensor, rules: _Rules
) -> Tensor:
    """Attention of one sequence, ``[num_heads, Q, head_size]``; distance is key minus query."""
    visible_QL = distance_QL <= 0
    if rules.window:
        visible_QL &= distance_QL > -rules.window
    dtype = query_HQD.dtype
    key_HLD, value_HLD = key_HLD.to(dtype), value_HLD.to(dtype)
    if query_HQD.shape[1] <= FEW_QUERIES or rules.changes_scores:
        scores_HQL = _scores(query_HQD, key_HLD, distance_QL, rules)
        weights_HQL = _softmax(scores_HQL.masked_fill(~visible_QL, -torch.inf), rules.sinks)
        return _grouped_matmul(weights_HQL, value_HLD).to(dtype)
    return scaled_dot_product_attention(
        query_HQD[None],
        key_HLD[None],
        value_HLD[None],
        attn_mask=visible_QL,
        scale=rules.scale,
        enable_gqa=True,
    )[0]


def _scores(query_HQD: Tensor, key_HLD: Tensor, distance_QL: Tensor, rules: _Rules) -> Tensor:
    """Scores ``[num_heads, Q, L]`` in fp32 with the changes that fused kernels do not offer."""
    scores_HQL = _grouped_matmul(query_HQD.float(), key_HLD.transpose(1, 2)) * rules.scale
    if rules.soft_cap:
        scores_HQL = rules.soft_cap * torch.tanh(scores_HQL / rules.soft_cap)
    if rules.alibi_slopes is not None:
        scores_HQL = scores_HQL + rules.alibi_slopes.float()[:, None, None] * distance_QL
    return scores_HQL


def _softmax(scores_HQL: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Softmax over the keys, with the sink's share taken off when there is one."""
    if sinks_H is None:
        return torch.softmax(scores_HQL, dim=-1)
    sink_HQ1 = sinks_H.float()[:, None, None].expand(-1, scores_HQL.shape[1], 1)
    return torch.softmax(torch.cat((scores_HQL, sink_HQ1), dim=-1), dim=-1)[..., :-1]


def _grouped_matmul(left_HQK: Tensor, right_HKL: Tensor) -> Tensor:
    """``[num_heads, Q, K] @ [num_kv_heads, K, L]`` in fp32; a group of heads shares its right."""
    heads, queries, inner = left_HQK.shape
    grouped = left_HQK.reshape(right_HKL.shape[0], -1, inner)
    return (grouped @ right_HKL.float()).view(heads, queries, -1)
