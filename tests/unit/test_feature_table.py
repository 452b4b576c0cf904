# SPDX-License-Identifier: Apache-2.0
"""docs/features.md is what the data of its tests says, and the data is whole."""

from __future__ import annotations

import re
from itertools import combinations

from scripts.feature_table import PAGE, render
from tests.feature_pairs import EVIDENCE, EXCLUSIVE, FAULTS, IMPLEMENTATIONS, Feature, cells
from tests.unit.markdown import assert_rows_fit


def test_the_page_is_what_the_data_says() -> None:
    assert PAGE.read_text() == render(), "run: python scripts/feature_table.py"


def test_every_pair_is_tested_or_exclusive() -> None:
    pairs = {frozenset(pair) for pair in combinations(Feature, 2)}
    for implementation in IMPLEMENTATIONS:
        tested = {cell.pair for cell in cells() if cell.implementation == implementation}
        assert tested | set(EXCLUSIVE) == pairs
        assert not tested & set(EXCLUSIVE)
    assert set(EVIDENCE) == set(Feature)
    assert set(FAULTS) <= set(cells())


def test_the_page_has_a_cell_for_every_pair() -> None:
    tested = len(set(cells()))
    assert len(re.findall(r"\| (?=yes|FAILS)", render())) == tested
    assert render().count("| never (") == len(EXCLUSIVE) * len(IMPLEMENTATIONS)


def test_every_table_row_has_the_columns_of_its_header() -> None:
    assert_rows_fit(render())
