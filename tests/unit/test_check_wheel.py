# SPDX-License-Identifier: Apache-2.0
"""The check of a wheel's contents notices what is missing and what should not be there."""

from __future__ import annotations

import pytest

from scripts.check_wheel import MAX_MIB, problems

GOOD = [
    "rbln_host/__init__.py",
    "rbln_host/_native.cpython-311-x86_64-linux-gnu.so",
    "rbln_host/_native.pyi",
    "rbln_host/py.typed",
    "rbln_vllm/py.typed",
    "rbln_vllm/cli/main.py",
    "rbln_vllm-0.1.0.dist-info/entry_points.txt",
    "rbln_vllm-0.1.0.dist-info/licenses/LICENSE",
]


def test_complete_wheel_has_no_problem() -> None:
    assert problems(GOOD, MAX_MIB * 2**20) == []


@pytest.mark.parametrize("name", GOOD[1:])
def test_missing_file_is_noticed(name: str) -> None:
    assert len(problems([other for other in GOOD if other != name], 1)) == 1


@pytest.mark.parametrize(
    "name",
    ["rbln_host/native/kernels.cc", "rbln_host/a.h", "tests/conftest.py", "rbln_vllm_sources.pth"],
)
def test_file_that_does_not_belong_is_noticed(name: str) -> None:
    assert problems([*GOOD, name], 1) == [f"{name} does not belong there"]


def test_size_is_limited() -> None:
    assert problems(GOOD, MAX_MIB * 2**20 + 1) == [f"{MAX_MIB}.0 MiB, the limit is {MAX_MIB} MiB"]
