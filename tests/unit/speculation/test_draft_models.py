# SPDX-License-Identifier: Apache-2.0
"""Which drafters are refused, in words that say what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.programs import DrafterShape, ProgramTable
from rbln_vllm.speculation.draft_models import check_drafter, drafter_shape, drafts_by_program

ARCHITECTURES = {
    "draft_model": "LlamaForCausalLM",
    "eagle": "EagleLlamaForCausalLM",
    "eagle3": "Eagle3LlamaForCausalLM",
    "medusa": "MedusaModel",
    "mtp": "MiMoMTPModel",
}


def config(method: str, architecture: str | None = None, **changes: Any) -> Any:
    """As much of vLLM's configuration as the rules read."""
    draft = SimpleNamespace(
        architectures=[architecture or ARCHITECTURES.get(method, "")],
        quantization=changes.pop("quantization", None),
    )
    values = {
        "method": method,
        "num_speculative_tokens": 3,
        "use_heterogeneous_vocab": False,
        "attention_backend": None,
        "kv_cache_dtype": None,
        "draft_model_config": draft,
        **changes,
    }
    return SimpleNamespace(speculative_config=SimpleNamespace(**values))


@pytest.mark.parametrize("method", ARCHITECTURES)
def test_known_drafters_are_taken(method: str) -> None:
    assert drafts_by_program(config(method))
    check_drafter(config(method), "vllm")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_no_model_drafts_has_no_programs(method: str) -> None:
    assert not drafts_by_program(config(method))
    assert drafter_shape(config(method)) is None
    check_drafter(config(method), "transformers")
    assert drafter_shape(SimpleNamespace(speculative_config=None)) is None


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("draft_model", {"use_heterogeneous_vocab": True}, "of the target's vocabulary"),
        ("draft_model", {"quantization": "fp8"}, "quantised draft model"),
        ("eagle", {"attention_backend": "FLASH_ATTN"}, "attention_backend and kv_cache_dtype"),
        ("mtp", {"architecture": "DeepSeekMTPModel"}, "supported are MiMoMTPModel"),
        ("eagle3", {"architecture": "Eagle3DeepseekV2ForCausalLM"}, "Use draft_model or ngram"),
    ],
)
def test_others_are_refused_in_words(method: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_drafter(config(method, **changes), "vllm")


@pytest.mark.parametrize("method", [m for m in ARCHITECTURES if m != "draft_model"])
def test_transformers_has_draft_models_only(method: str) -> None:
    with pytest.raises(ValueError, match="needs --model-impl vllm"):
        check_drafter(config(method), "transformers")
    check_drafter(config("draft_model"), "transformers")


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("draft_model", DrafterShape(5, keeps_kv=True)),
        ("eagle", DrafterShape(4, keeps_kv=True)),
        ("medusa", DrafterShape(1, keeps_kv=False)),
    ],
)
def test_sizes_of_drafters(method: str, shape: DrafterShape) -> None:
    assert drafter_shape(config(method)) == shape
    table = ProgramTable(64, (1, 2), block_size=16, num_blocks_per_seq=4, drafter=shape)
    names = [key.name for key in table.drafts]
    rows = [f"draft_b{batch}_q{shape.query}" for batch in (1, 2)]
    assert names == ["draft_prefill_b1_q64", *rows] if shape.keeps_kv else names == rows
    assert set(table.drafts) <= set(table.programs)
    assert table.draft_for(2) is not None
    with pytest.raises(ValueError, match="no decode bucket holds 3"):
        table.draft_for(3)


def test_a_table_without_a_drafter_has_no_draft_programs() -> None:
    table = ProgramTable(64, (1, 2), block_size=16, num_blocks_per_seq=4)
    assert table.drafts == ()
    with pytest.raises(ValueError, match="no model drafts"):
        table.draft_for(1)
