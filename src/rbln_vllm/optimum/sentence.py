# SPDX-License-Identifier: Apache-2.0
"""What Sentence-Transformers keeps beside a model: how it pools, and how long its texts are."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MODULES = "modules.json"
FILES = (MODULES, "sentence_*_config.json", "config_sentence_transformers.json")
"""Files beside ``config.json``; modules with a configuration or weights have folders of their own.
"""


def pools(directory: Path) -> bool:
    """Whether the model was made to embed: one of its modules pools."""
    return any(str(module.get("type", "")).endswith("Pooling") for module in _modules(directory))


def longest_text(directory: Path, config: Any) -> int | None:
    """Tokens of the longest text, where that is said; vLLM reads the same places.

    Beside Sentence-Transformers' own configuration the tokenizer's counts, for models whose
    configuration says that their positions are absolute.
    """
    for file in sorted(directory.glob("sentence_*_config.json")):
        length = _read(file).get("max_seq_length")
        if length is not None:
            return int(length)
    if getattr(config, "position_embedding_type", None) != "absolute":
        return None
    length = _read(directory / "tokenizer_config.json").get("model_max_length")
    return None if length is None else int(length)


def copy_modules(source: Path, target: Path) -> None:
    """Copy what says how vectors are pooled. OSError when the disk raises it."""
    for pattern in FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    for folder in _folders(source):
        shutil.copytree(source / folder, target / folder, dirs_exist_ok=True)


def _folders(directory: Path) -> Iterator[str]:
    """Folders of modules, none outside the model's directory."""
    root = directory.resolve()
    for module in _modules(directory):
        path = (root / str(module.get("path", ""))).resolve()
        if path != root and path.is_relative_to(root) and path.is_dir():
            yield str(path.relative_to(root))


def _modules(directory: Path) -> list[Mapping[str, Any]]:
    file = directory / MODULES
    if not file.is_file():
        return []
    found = json.loads(file.read_text())
    return [module for module in found if isinstance(module, dict)]


def _read(file: Path) -> Mapping[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
