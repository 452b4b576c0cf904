# SPDX-License-Identifier: Apache-2.0
"""Rows whose token is dropped keep their generators as they are."""

from __future__ import annotations

import pytest
import torch

from rbln_vllm.worker.sampling.generators import drawing_nothing


def test_rows_have_no_generator_meanwhile_and_the_same_one_after() -> None:
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 2, 3)}
    before = dict(generators)
    with drawing_nothing(generators, [1, 2]):
        assert generators == {0: before[0], 3: before[3]}
    assert generators == before


def test_they_come_back_after_an_error() -> None:
    generators = {0: torch.Generator()}
    before = dict(generators)
    with pytest.raises(ValueError, match="no step"), drawing_nothing(generators, [0]):
        raise ValueError("no step")
    assert generators == before
