# SPDX-License-Identifier: Apache-2.0
"""`rbln::encoder_attention` against attention written in plain loops."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rbln_host.ops import attention, encoder_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WAYS = (0, 1000)
"""Values of FEW_QUERIES that make every row take one of the two ways to compute it."""


def plain(query: Tensor, key: Tensor, value: Tensor, starts: list[int], scale: float) -> Tensor:
    """Token by token, head by head, in fp64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for start, end in pairwise(starts):
        for token in range(start, end):
            for head in range(query.shape[1]):
                keys = key[start:end, head // group].double()
                weights = torch.softmax(keys @ query[token, head].double() * scale, dim=0)
                out[token, head] = weights @ value[start:end, head // group].double()
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("few", WAYS)
def test_equals_plain_attention(
    dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FEW_QUERIES", few)
    torch.manual_seed(1)
    starts = [2, 3, 3, 12, 25]
    query, key, value = (torch.randn(28, heads, 8).to(dtype) for heads in (4, 2, 2))
    for tensor in (query, key, value):
        tensor[:2] = tensor[25:] = torch.nan
    out = encoder_attention(query, key, value, torch.tensor(starts), 0.3)
    expected = plain(query, key, value, starts, 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert out.dtype == dtype
    assert out.is_contiguous()
    alone = encoder_attention(query[3:12], key[3:12], value[3:12], torch.tensor([0, 9]), 0.3)
    assert torch.equal(alone, out[3:12])


@pytest.mark.parametrize("starts", [[-1, 3], [0, 3, 2], [0, 5]])
def test_starts_that_are_none(starts: list[int]) -> None:
    ones = torch.ones(4, 1, 8)
    with pytest.raises(IndexError, match="is before another's or outside the tokens"):
        encoder_attention(ones, ones, ones, torch.tensor(starts), 1.0)
