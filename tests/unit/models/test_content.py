# SPDX-License-Identifier: Apache-2.0
"""A model's content digest follows its contents and nothing else."""

import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from rbln_host.compiler.files import digest_file
from rbln_vllm.models.content import _config_text, model_content, weight_files
from rbln_vllm.sources import digest_packages


def model(directory: Path, **config: Any) -> Any:
    """As much of vLLM's ModelConfig as the digest reads."""
    return SimpleNamespace(
        model=str(directory), model_weights=None, revision=None, hf_config=LlamaConfig(**config)
    )


def content(model: Any, load_format: str) -> str:
    return model_content(model, load_format, digest_file)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "first"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"weights a")
    (directory / "b.safetensors").write_bytes(b"weights b")
    return directory


def test_same_content_elsewhere_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "name"
    shutil.copytree(checkpoint, other)
    (other / "README.md").write_text("not content")
    named = model(other)
    named.hf_config.name_or_path = "another/name"
    assert content(model(checkpoint), "auto") == content(named, "auto")


@pytest.mark.parametrize("change", ["byte", "rename", "drop", "config", "dummy"])
def test_other_content_differs(checkpoint: Path, change: str) -> None:
    before = content(model(checkpoint), "auto")
    after = model(checkpoint, hidden_size=512) if change == "config" else model(checkpoint)
    if change == "byte":
        (checkpoint / "a.safetensors").write_bytes(b"weights A")
    elif change == "rename":
        (checkpoint / "a.safetensors").rename(checkpoint / "c.safetensors")
    elif change == "drop":
        (checkpoint / "b.safetensors").unlink()
    assert content(after, "dummy" if change == "dummy" else "auto") != before


def test_names_inside_the_configuration_are_not_content() -> None:
    config = {"text_config": {"_name_or_path": "/a", "hidden_size": 8}}
    other = {"text_config": {"_name_or_path": "/b", "hidden_size": 8}}
    assert _config_text(config) == _config_text(other)


def test_code_digest_follows_content(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = digest_packages((package(tmp_path),))
    (tmp_path / "a.py").write_text("x = 2")
    assert digest_packages((package(tmp_path),)) != before


def package(directory: Path) -> ModuleType:
    """A package whose files are in ``directory``; a new object each time."""
    module = ModuleType("made")
    module.__path__ = [str(directory)]
    return module


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    assert content(model(tmp_path), "dummy") == content(model(tmp_path), "dummy")


def test_one_format_is_taken(checkpoint: Path) -> None:
    (checkpoint / "old.bin").write_bytes(b"the same in another format")
    assert [path.name for path in weight_files(model(checkpoint))] == [
        "a.safetensors",
        "b.safetensors",
    ]


def test_no_weights_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no weights in .*\*\.safetensors"):
        weight_files(model(tmp_path))
