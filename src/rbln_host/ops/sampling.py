# SPDX-License-Identifier: Apache-2.0
"""``rbln::mask_tokens`` and ``rbln::sample``: what a grammar allows, and the next token of a row.

Random numbers come from a counter-based generator, Philox 4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11): the number of a draw is a function of the request's seed and
of the token's position in its output, so a draw can be repeated in any batch, row or run.
"""

import torch
from torch import Tensor

from rbln_host.ops.library import define

GREEDY_BELOW = float(torch.tensor(1e-5))
"""Rows with a lower temperature take their largest logit. The fp32 number, as in vLLM."""
PADDING_ROW = -1
"""Rows at this position (or any below 0) are padding: nothing else of theirs is read."""
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: int, key: int) -> tuple[int, int, int, int]:
    """Block ``counter`` (128 bits) of the stream ``key`` (64 bits): four words of 32 bits."""
    c = [counter >> shift & _WORD for shift in (0, 32, 64, 96)]
    k = [key & _WORD, key >> 32 & _WORD]
    for _ in range(10):
        low, high = _MULTIPLIERS[0] * c[0], _MULTIPLIERS[1] * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & _WORD, low >> 32 ^ c[3] ^ k[1], low & _WORD]
        k = [(word + step) & _WORD for word, step in zip(k, _WEYL, strict=True)]
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int) -> float:
    """The number of a draw, in [0, 1), with 53 random bits. ``position`` is 0 or more."""
    first, second, _, _ = philox(position, seed)
    return float((second << 32 | first) >> 11) * 2.0**-53


@define(
    "mask_tokens(Tensor bitmask_RW, Tensor(a!) logits_RV) -> ()",
    meta=lambda bitmask_RW, logits_RV: None,
)
def mask_tokens(bitmask_RW: Tensor, logits_RV: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -infinity.

    Bit ``t % 32`` of word ``t // 32`` says whether token ``t`` is allowed (as in xgrammar and
    llguidance); ``bitmask_RW`` is int32 ``[R, ceil(V / 32)]``. A row of -1 stays as it is.
    """
    logits_RV.masked_fill_(~_allowed(bitmask_RW, logits_RV.shape[1]), -torch.inf)


def _allowed(bitmask_RW: Tensor, tokens: int) -> Tensor:
    """bool ``[R, tokens]``."""
    bits_RWB = bitmask_RW.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
    return bits_RWB.flatten(1)[:, :tokens] != 0


def _meta(logits_RV: Tensor, *_parameters: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = logits_RV.shape[0]
    token_R = logits_RV.new_empty(rows, dtype=torch.int64)
    return token_R, logits_RV.new_empty(rows, dtype=torch.float32)


@define(
    "sample(Tensor logits_RV, Tensor temperature_R, Tensor top_k_R, Tensor top_p_R, "
    "Tensor seed_R, Tensor position_R, Tensor? bitmask_RW=None) -> (Tensor, Tensor)",
    meta=_meta,
)
def sample(  # noqa: PLR0917 (an operator's arguments are positional)
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    bitmask_RW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row -> (token int64 ``[R]``, threshold fp32 ``[R]``).

    Tokens that ``bitmask_RW`` (as of :func:`mask_tokens`) forbids are left out as if the vocabulary
    were without them; a row that forbids all gives token 0. Of the others, in this order: logits
    are divided by the temperature in fp32; top-k leaves the k largest, and all that equal the k-th;
    top-p leaves the largest whose probabilities among those sum to p, and all that equal the last
    of them, at least one. Of what is left the token is the first, by id, at which the running sum
    of probabilities exceeds the row's random number (:func:`uniform`).
    ``threshold`` is the least logit, after the division, that could be drawn.

    A temperature below ``GREEDY_BELOW`` or NaN takes the first of the largest logits. Off are a
    top-k (int32) below 1 or not below their number, and a top-p of 1 or more or NaN. A row with NaN
    gives the first NaN; one with +infinity, one of those; one of -infinity alone, the first token.
    A row at a negative position is padding and gives 0.

    Kernels agree on the token unless the random number is within about 1e-6 of where, in the
    running sum, one token ends and the next begins: their exponentials differ by rounding.
    """
    allowed_RV = torch.ones(logits_RV.shape, dtype=torch.bool)
    if bitmask_RW is not None:
        allowed_RV = _allowed(bitmask_RW, logits_RV.shape[1])
    drawn = [
        _sample_row(
            logits_RV[row].float(),
            allowed_RV[row].nonzero().flatten(),
            float(temperature_R[row]),
            (int(top_k_R[row]), float(top_p_R[row])),
            (int(seed_R[row]), int(position_R[row])),
        )
        for row in range(logits_RV.shape[0])
    ]
    tokens = [token for token, _ in drawn]
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor([least for _, least in drawn])


def _sample_row(
    logits_V: Tensor,
    token_A: Tensor,
    temperature: float,
    limits: tuple[int, float],
    draw: tuple[int, int],
) -> tuple[int, float]:
    """``token_A`` are the tokens that are allowed, ``limits`` top-k and top-p."""
    if draw[1] < 0:
        return 0, 0.0
    if not token_A.shape[0]:
        return 0, -torch.inf
    index, least = _choose(logits_V[token_A], temperature, limits, draw)
    return int(token_A[index]), least


def _choose(
    logits_V: Tensor, temperature: float, limits: tuple[int, float], draw: tuple[int, int]
) -> tuple[int, float]:
    top_k, top_p = limits
    if not temperature >= GREEDY_BELOW:
        token = int(logits_V.argmax())
        return token, float(logits_V[token])
    most = torch.finfo(torch.float32).max
    scaled_V = logits_V / torch.tensor(min(temperature, most), dtype=torch.float32)
    if scaled_V.isnan().any():
        return int(scaled_V.isnan().int().argmax()), -torch.inf
    if scaled_V.max() == -torch.inf:
        return 0, -torch.inf
    infinite_V = scaled_V == torch.inf
    if infinite_V.any():
        scaled_V = torch.where(infinite_V, 0.0, -torch.inf)
    least = max(_top_k_threshold(scaled_V, top_k), -torch.inf)
    least = max(least, _top_p_threshold(scaled_V.masked_fill(scaled_V < least, -torch.inf), top_p))
    token = _pick(scaled_V.masked_fill(scaled_V < least, -torch.inf), uniform(*draw))
    return token, torch.inf if infinite_V.any() and least > -torch.inf else least


def _top_k_threshold(scaled_V: Tensor, top_k: int) -> float:
    if not 0 < top_k < scaled_V.shape[0]:
        return -torch.inf
    finite_F = scaled_V[scaled_V > -torch.inf]
    return float(finite_F.topk(min(top_k, finite_F.shape[0])).values[-1])


def _top_p_threshold(scaled_V: Tensor, top_p: float) -> float:
    if not top_p < 1.0:
        return -torch.inf
    sorted_F = scaled_V[scaled_V > -torch.inf].sort(descending=True).values
    running_F = (sorted_F - sorted_F[0]).exp().double().cumsum(0)
    enough_F = running_F >= max(top_p, 0.0) * running_F[-1]
    return float(sorted_F[int(enough_F.int().argmax())])


def _pick(scaled_V: Tensor, number: float) -> int:
    weights_V = (scaled_V - scaled_V.max()).exp().double()
    running_V = weights_V.cumsum(0)
    beyond_V = (running_V > number * running_V[-1]) & (weights_V > 0)
    if beyond_V.any():
        return int(beyond_V.int().argmax())
    return int(weights_V.nonzero()[-1])  # by rounding
