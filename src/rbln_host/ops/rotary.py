# SPDX-License-Identifier: Apache-2.0
"""``rbln::rotary_embedding`` (Su et al., RoFormer, 2021) and ``rbln::rotary_write_kv``."""

import torch
from torch import Tensor

from rbln_host.ops.kv_cache import write_kv
from rbln_host.ops.library import define


def _rotary_meta(input_NHD: Tensor, positions_N: Tensor, cos_sin_PR: Tensor, neox: bool) -> Tensor:
    _check(input_NHD, positions_N, cos_sin_PR)
    return input_NHD.new_empty(input_NHD.shape)


@define(
    "rotary_embedding(Tensor input_NHD, Tensor positions_N, Tensor cos_sin_PR, bool neox) "
    "-> Tensor",
    meta=_rotary_meta,
)
def rotary_embedding(
    input_NHD: Tensor, positions_N: Tensor, cos_sin_PR: Tensor, neox: bool
) -> Tensor:
    """Rotate the first R features of every head by the angles of the row's position.

    Shapes: ``input_NHD`` and the result ``[N, heads, head_size]``; ``positions_N`` ``[N]``
    integers; ``cos_sin_PR`` ``[positions, R]``, each row the cosines and then the sines of R / 2
    angles, R at most head_size. ``neox`` pairs feature i with i + R / 2, otherwise 2i with
    2i + 1. Features from R on pass through. Computed in fp32 and rounded once.
    Raises IndexError for a position outside the table, ValueError for other shapes or dtypes.
    """
    _check(input_NHD, positions_N, cos_sin_PR)
    size = cos_sin_PR.shape[1]
    rotated_NHR, rest_NHE = input_NHD[..., :size].float(), input_NHD[..., size:]
    cos_N1A, sin_N1A = cos_sin_PR.index_select(0, positions_N).float()[:, None].chunk(2, dim=-1)
    if neox:
        first_NHA, second_NHA = rotated_NHR.chunk(2, dim=-1)
    else:
        first_NHA, second_NHA = rotated_NHR[..., ::2], rotated_NHR[..., 1::2]
    turned = (
        first_NHA * cos_N1A - second_NHA * sin_N1A,
        second_NHA * cos_N1A + first_NHA * sin_N1A,
    )
    joined_NHR = torch.cat(turned, dim=-1) if neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined_NHR.to(input_NHD.dtype), rest_NHE), dim=-1)


def _rotary_write_kv_meta(  # noqa: PLR0917 (an operator's arguments are positional)
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    positions_N: Tensor,
    cos_sin_PR: Tensor,
    kv_cache: Tensor,
    slots_N: Tensor,
    neox: bool,
) -> Tensor:
    _check(key_NHD, positions_N, cos_sin_PR)
    return _rotary_meta(query_NHD, positions_N, cos_sin_PR, neox)


@define(
    "rotary_write_kv(Tensor query_NHD, Tensor key_NHD, Tensor value_NHD, Tensor positions_N, "
    "Tensor cos_sin_PR, Tensor(a!) kv_cache, Tensor slots_N, bool neox) -> Tensor",
    meta=_rotary_write_kv_meta,
)
def rotary_write_kv(  # noqa: PLR0917 (an operator's arguments are positional)
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    positions_N: Tensor,
    cos_sin_PR: Tensor,
    kv_cache: Tensor,
    slots_N: Tensor,
    neox: bool,
) -> Tensor:
    """Rotate query and key, write key and value at their slots, return the rotated query.

    Shapes and errors as in :func:`rotary_embedding` and :func:`rbln_host.ops.write_kv`.
    """
    rotated_key_NHD = rotary_embedding(key_NHD, positions_N, cos_sin_PR, neox)
    rotated_query_NHD = rotary_embedding(query_NHD, positions_N, cos_sin_PR, neox)
    write_kv(rotated_key_NHD, value_NHD, kv_cache, slots_N)
    return rotated_query_NHD


def _check(input_NHD: Tensor, positions_N: Tensor, cos_sin_PR: Tensor) -> None:
    size = cos_sin_PR.shape[-1]
    fits = (
        input_NHD.dim() == 3
        and cos_sin_PR.dim() == 2
        and positions_N.shape == input_NHD.shape[:1]
        and size % 2 == 0
        and size <= input_NHD.shape[-1]
    )
    if not fits or input_NHD.dtype != cos_sin_PR.dtype:
        raise ValueError(
            f"rotary_embedding: input {input_NHD.dtype} {tuple(input_NHD.shape)}, positions "
            f"{tuple(positions_N.shape)} and table {cos_sin_PR.dtype} {tuple(cos_sin_PR.shape)} "
            "do not fit"
        )
