# SPDX-License-Identifier: Apache-2.0
"""Which adapter each sequence of a batch has, without an engine."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rbln_vllm.optimum.adapter_choice import AdapterChoice

STORED: Any = SimpleNamespace(ids={"sql": 1, "chat": 2})


def slots(choice: AdapterChoice, rows: int) -> list[int] | None:
    found = choice.slots_B(rows)
    return None if found is None else found.tolist()


def test_at_first_the_base_model() -> None:
    assert slots(AdapterChoice(STORED), 3) is None
    assert slots(AdapterChoice(None), 1) is None


def test_one_for_all_and_one_for_each() -> None:
    choice = AdapterChoice(STORED)
    choice.choose("chat")
    assert slots(choice, 2) == [1, 1]
    choice.choose([None, "sql", "base", "chat"])
    assert slots(choice, 4) == [-1, 0, -1, 1]
    choice.choose_ids(torch.tensor([2, 0]))
    assert slots(choice, 2) == [1, -1]
    choice.choose_ids([0])
    assert slots(choice, 1) is None
    for nobody in (None, "base"):
        choice.choose("sql")
        choice.choose(nobody)
        assert slots(choice, 2) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_one_for_each_of_another_batch(rows: int) -> None:
    choice = AdapterChoice(STORED)
    choice.choose(["sql", None])
    with pytest.raises(ValueError, match=f"chosen for 2 sequences, and these are {rows}"):
        choice.slots_B(rows)


def test_unknown_ones_change_nothing() -> None:
    choice = AdapterChoice(STORED)
    choice.choose("sql")
    known = "the model was compiled with sql (1), chat (2)"
    with pytest.raises(ValueError, match=re.escape(f"there is no adapter 'x': {known}")):
        choice.choose(["sql", "x"])
    with pytest.raises(RuntimeError, match=re.escape(f"Invalid `lora_int_id` [3]: {known}")):
        choice.choose_ids([1, 3])
    assert slots(choice, 1) == [0]


def test_a_model_without_adapters() -> None:
    with pytest.raises(ValueError, match="was compiled without adapters"):
        AdapterChoice(None).choose("sql")
    with pytest.raises(RuntimeError, match="was compiled without adapters"):
        AdapterChoice(None).choose_ids([1])
