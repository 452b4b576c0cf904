# SPDX-License-Identifier: Apache-2.0
"""What Sentence-Transformers keeps beside a model is found, and copied whole."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.optimum.sentence import copy_modules, longest_text, pools

ABSOLUTE = SimpleNamespace(position_embedding_type="absolute")
ROTARY = SimpleNamespace()


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3", "Normalize"),
    ]
    entries = [{"path": path, "type": f"a.models.{kind}"} for path, kind in modules]
    write(directory / "modules.json", entries)
    write(directory / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write(directory / "2_Dense" / "config.json", {})
    write(directory / "2_Dense" / "deep" / "weights", [1])
    write(directory / "onnx" / "model.json", {})
    write(directory / "config_sentence_transformers.json", {})
    return directory


def test_a_model_that_pools(model: Path, tmp_path: Path) -> None:
    assert pools(model)
    assert not pools(tmp_path)
    write(tmp_path / "modules.json", [{"path": "", "type": "a.models.Transformer"}])
    assert not pools(tmp_path)


def test_all_that_pooling_needs_is_copied(model: Path, tmp_path: Path) -> None:
    write(model / "sentence_bert_config.json", {"max_seq_length": 7})
    target = tmp_path / "target"
    target.mkdir()
    copy_modules(model, target)
    copy_modules(model, target)
    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == {
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/deep/weights",
    }


@pytest.mark.parametrize("path", ["..", "../other", "/etc", "."])
def test_nothing_outside_the_model_is_copied(model: Path, tmp_path: Path, path: str) -> None:
    write(tmp_path / "other" / "secret", {})
    write(model / "modules.json", [{"path": path, "type": "a.Pooling"}])
    target = tmp_path / "target"
    target.mkdir()
    copy_modules(model, target)
    names = {file.name for file in target.iterdir()}
    assert names == {"modules.json", "config_sentence_transformers.json"}


def test_the_longest_text(model: Path) -> None:
    assert longest_text(model, ABSOLUTE) is None
    write(model / "tokenizer_config.json", {"model_max_length": 512})
    assert longest_text(model, ABSOLUTE) == 512
    assert longest_text(model, ROTARY) is None
    write(model / "sentence_bert_config.json", {"max_seq_length": None})
    assert longest_text(model, ROTARY) is None
    write(model / "sentence_bert_config.json", {"max_seq_length": 256})
    assert longest_text(model, ABSOLUTE) == 256
