# SPDX-License-Identifier: Apache-2.0
"""Means of rows that lie one after another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rbln_vllm.worker.pooling.means import RowMeans, row_means


def metadata(lengths: list[int], *, partial: bool = False) -> Any:
    cursor = SimpleNamespace(
        prompt_lens_cpu=torch.tensor(lengths), is_partial_prefill=lambda: partial
    )
    return SimpleNamespace(get_pooling_cursor=lambda: cursor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [7, 1, 33, 2]])
def test_means_of_rows(dtype: torch.dtype, lengths: list[int]) -> None:
    hidden_NH = torch.randn(sum(lengths), 24).to(dtype)
    found = RowMeans()(hidden_NH, metadata(lengths))
    expected = [part.double().mean(0) for part in hidden_NH.split(lengths)] if lengths else []
    assert found.dtype == torch.float32
    assert found.shape == (len(lengths), 24)
    for mean, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mean.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_mean_depends_on_its_row_alone() -> None:
    hidden_NH = torch.randn(60, 40)
    (alone,) = row_means(hidden_NH[5:42], [37])
    assert torch.equal(row_means(hidden_NH, [5, 37, 18])[1], alone)


def test_a_part_of_a_prompt_has_no_mean() -> None:
    with pytest.raises(RuntimeError, match="partial prefill"):
        RowMeans()(torch.zeros(2, 4), metadata([3], partial=True))
