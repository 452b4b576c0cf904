# SPDX-License-Identifier: Apache-2.0
"""The files of a model: found here or fetched from the hub, and what a server needs of them."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HUB_KEYWORDS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
"""Keywords of ``from_pretrained`` that say how to fetch."""
SERVED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "chat_template.*",
    "LICENSE*",
)
"""Files beside ``config.json`` that a server reads, and the licence they come under."""
_DOCUMENTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")


def local_directory(model_id: str, hub: Mapping[str, Any]) -> Path:
    """The model's directory; of a hub id the snapshot, fetched if it is not here.

    Weights are fetched in safetensors' format where the model has it. FileNotFoundError for a
    path that is not there, OSError of the hub's client.
    """
    directory = Path(model_id)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or model_id.startswith("."):
        raise FileNotFoundError(f"there is no directory {model_id}")
    from huggingface_hub import snapshot_download

    found = Path(snapshot_download(model_id, allow_patterns=[*_DOCUMENTS, "*.safetensors"], **hub))
    if not next(found.glob("*.safetensors"), None):
        snapshot_download(model_id, allow_patterns=["*.bin"], **hub)
    return found


def copy_served_files(source: Path, target: Path) -> None:
    """Copy what a server reads beside the configuration. OSError when the disk raises it."""
    for file in served_files(source):
        shutil.copyfile(file, target / file.name)


def served_files(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.is_file() and any(file.match(pattern) for pattern in SERVED):
            yield file


def link_or_copy(source: str, target: str) -> None:
    """A second name for a file that nobody changes, or a copy where there can be none."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
