# SPDX-License-Identifier: Apache-2.0
"""``rbln::paged_attention``: causal attention of new queries over the paged KV pool.

One operator serves prefill (one sequence, Q queries) and decode (B sequences, one query each):
queries come as a ``[B * Q]`` grid and each carries its own position.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rbln_host.ops.library import define

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
def paged_attention(
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
    """
    batch = block_table_BT.shape[0]
    queries = query_NHD.shape[0] // batch
    output_NHD = torch.zeros_like(query_NHD, memory_format=torch.contiguous_format)
    for row, positions in enumerate(query_pos_N.view(batch, queries).tolist()):
        real = [i for i, position in enumerate(positions) if position >= 0]
        if not real:
            continue
        context = max(positions) + 1
        index = torch.tensor([row * queries + i for i in real])
        key_HLD, value_HLD = _gather_context(kv_cache, block_table_BT[row], context)
        output_NHD[index] = _attend(
            query_NHD[index].transpose(0, 1),
            key_HLD,
            value_HLD,
            torch.tensor([positions[i] for i in real]),
            scale,
            window,
            soft_cap,
            sinks_H,
            alibi_slopes_H,
        ).transpose(0, 1)
    return output_NHD


def _gather_context(kv_cache: Tensor, blocks_T: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The first ``context`` keys and values of a sequence, each ``[num_kv_heads, L, head_size]``."""
    _, heads, block_size, pair = kv_cache.shape
    needed = blocks_T[: -(-context // block_size)].long()
    pair_HLD = kv_cache[needed].transpose(0, 1).reshape(heads, -1, pair)[:, :context]
    key_HLD, value_HLD = pair_HLD.chunk(2, dim=-1)
    return key_HLD, value_HLD


def _attend(
    query_HQD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    query_pos_Q: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks_H: Tensor | None,
    alibi_slopes_H: Tensor | None,
) -> Tensor:
    """Attention of one sequence; ``[num_heads, Q, head_size]``."""
    visible_QL, distance_QL = _visibility(query_pos_Q, key_HLD.shape[1], window)
    key_HLD, value_HLD = key_HLD.to(query_HQD.dtype), value_HLD.to(query_HQD.dtype)
    if soft_cap or sinks_H is not None:
        return _explicit_softmax(
            query_HQD,
            key_HLD,
            value_HLD,
            visible_QL,
            distance_QL,
            scale,
            soft_cap,
            sinks_H,
            alibi_slopes_H,
        )
    mask = torch.where(visible_QL, 0.0, -torch.inf).to(query_HQD.dtype)
    if alibi_slopes_H is not None:
        mask = mask + (alibi_slopes_H[:, None, None] * distance_QL).to(query_HQD.dtype)
    return scaled_dot_product_attention(
        query_HQD[None],
        key_HLD[None],
        value_HLD[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )[0]


def _visibility(query_pos_Q: Tensor, context: int, window: int) -> tuple[Tensor, Tensor]:
    """Which keys each query sees (bool ``[Q, L]``) and key minus query position (``[Q, L]``)."""
    distance_QL = torch.arange(context)[None, :] - query_pos_Q[:, None]
    visible_QL = distance_QL <= 0
    if window:
        visible_QL &= distance_QL > -window
    return visible_QL, distance_QL


def _explicit_softmax(
    query_HQD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    visible_QL: Tensor,
    distance_QL: Tensor,
    scale: float,
    soft_cap: float,
    sinks_H: Tensor | None,
    alibi_slopes_H: Tensor | None,
) -> Tensor:
    """Softmax attention in fp32 with the score changes that fused kernels do not offer."""
    groups = query_HQD.shape[0] // key_HLD.shape[0]
    key_HLD = key_HLD.float().repeat_interleave(groups, dim=0)
    value_HLD = value_HLD.float().repeat_interleave(groups, dim=0)
    scores_HQL = query_HQD.float() @ key_HLD.transpose(1, 2) * scale
    if soft_cap:
        scores_HQL = soft_cap * torch.tanh(scores_HQL / soft_cap)
    if alibi_slopes_H is not None:
        scores_HQL = scores_HQL + alibi_slopes_H[:, None, None] * distance_QL
    scores_HQL = scores_HQL.masked_fill(~visible_QL, -torch.inf)
    if sinks_H is not None:
        sink_HQ1 = sinks_H.float()[:, None, None].expand(-1, scores_HQL.shape[1], 1)
        scores_HQL = torch.cat((scores_HQL, sink_HQ1), dim=-1)
    weights_HQL = torch.softmax(scores_HQL, dim=-1)[..., : key_HLD.shape[1]]
    return (weights_HQL @ value_HLD).to(query_HQD.dtype)
