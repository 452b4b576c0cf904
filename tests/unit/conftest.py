# SPDX-License-Identifier: Apache-2.0
"""What unit tests draw at random is the same in every run, on any machine, in any order."""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, settings

# A busy machine may take any time for an example, or to make one.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def own_random_numbers() -> None:
    """A test does not draw on from where the one before it stopped."""
    torch = sys.modules.get("torch")  # not imported for tests that need none
    if torch is not None:
        torch.manual_seed(0)
