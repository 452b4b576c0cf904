# SPDX-License-Identifier: Apache-2.0
"""Every two features are served together, and nothing that comes out changes.

The engines of feature_runs.py have more than two features each; a cell looks at the requests in
which both of its features took part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.adapters import Adapter
from tests.engine.feature_runs import ENGINES, LOAD, Runs
from tests.feature_pairs import EXCLUSIVE, FAULTS, IMPLEMENTATIONS, Cell, Feature, cells

RunsOf = Callable[[str], Runs]


@pytest.fixture(scope="module")
def runs_of(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunsOf:
    """The runs of an implementation, made once."""
    adapter = Adapter(seed=1).save(tiny_llama_dir, tmp_path_factory.mktemp("adapter"))
    return cache(lambda implementation: Runs(implementation, tiny_llama_dir, adapter))


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_together(runs_of: RunsOf, cell: Cell) -> None:
    if cell in FAULTS:
        pytest.xfail(FAULTS[cell])
    served = runs_of(cell.implementation).served
    for item in served:
        if cell.pair <= item.concerns:
            assert item.tokens == item.expected, (item.engine, item.asked)
    assert any(cell.pair <= item.seen for item in served), "no request in which both took part"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exclusive_pairs_never_meet(runs_of: RunsOf, implementation: str) -> None:
    served = runs_of(implementation).served
    assert len(served) == len(ENGINES) * len(LOAD)
    for pair in EXCLUSIVE:
        assert not any(pair <= item.seen for item in served), pair


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_feature_is_in_several_requests(runs_of: RunsOf, implementation: str) -> None:
    """One alone might be there by chance."""
    counts = Counter(feature for item in runs_of(implementation).served for feature in item.seen)
    assert min(counts[feature] for feature in Feature) >= len(ENGINES), counts
