# SPDX-License-Identifier: Apache-2.0
"""The table of architectures is what Transformers has, and says why something is refused."""

import importlib

import pytest

from rbln_vllm.models.architectures import (
    ARCHITECTURES,
    POOLING_TASKS,
    Architecture,
    Task,
    built,
    check_architecture,
    is_encoder,
)
from scripts.architecture_table import IMPLEMENTATIONS, PAGE, measured_cells, render


@pytest.mark.parametrize("name", built())
def test_transformers_has_it(name: str) -> None:
    row = ARCHITECTURES[name]
    assert hasattr(importlib.import_module(row.module), name)
    assert row.class_name == f"RBLN{name}"


def test_names_are_unique_and_keyed() -> None:
    assert all(row.name == name for name, row in ARCHITECTURES.items())


def test_the_first_known_name_decides() -> None:
    assert check_architecture(["Unknown", "LlamaForCausalLM"]).name == "LlamaForCausalLM"


def test_refusals_say_why() -> None:
    with pytest.raises(ValueError, match="MidmLMHeadModel: its modules are not part of Trans"):
        check_architecture(["MidmLMHeadModel"])
    with pytest.raises(ValueError, match="nothing for Unknown: use --model-impl vllm, or a model"):
        check_architecture(["Unknown"])
    with pytest.raises(ValueError, match="nothing for this model"):
        check_architecture([])


def test_a_task_that_an_architecture_does_not_have() -> None:
    assert check_architecture(["Qwen3ForCausalLM"], Task.EMBED).name == "Qwen3ForCausalLM"
    assert check_architecture(["BertModel"], *POOLING_TASKS).encoder
    with pytest.raises(ValueError, match="LlamaForCausalLM is not built for embed: use a model of"):
        check_architecture(["LlamaForCausalLM"], Task.EMBED)
    with pytest.raises(ValueError, match="BertModel is not built for generate"):
        check_architecture(["BertModel"], Task.GENERATE)
    assert "BertModel" in built(Task.EMBED)
    assert "BertModel" not in built(Task.GENERATE)


def test_encoders() -> None:
    assert is_encoder(["Unknown", "XLMRobertaModel"])
    assert not is_encoder(["Qwen3Model"])
    assert not is_encoder(["Unknown"])


def test_a_row_needs_tasks_and_devices() -> None:
    with pytest.raises(ValueError, match="no task or no device"):
        Architecture("A", "a", devices=frozenset())


def test_the_page_is_what_the_generator_writes() -> None:
    """But for what it measures, which tests of engines compare."""
    page = PAGE.read_text()
    assert render(measured_cells(page)) == page, "run: python scripts/architecture_table.py"


def test_the_page_was_measured() -> None:
    cells = measured_cells(PAGE.read_text())
    for name in built():
        for implementation in IMPLEMENTATIONS:
            measured = implementation == "transformers" or name in built(Task.GENERATE)
            assert ("of products" in cells[name, implementation]) is measured, name
