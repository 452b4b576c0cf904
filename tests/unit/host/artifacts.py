# SPDX-License-Identifier: Apache-2.0
"""An artifact of two programs, and how to forge it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.files import digest
from rbln_host.compiler.manifest import MANIFEST
from tests.unit.host.programs import manifest, scale_program

WEIGHTS = {"a": torch.arange(4.0), "b": torch.tensor([0.5, -1.0, float("inf"), 2.0])}


@pytest.fixture
def written(tmp_path: Path) -> Artifact:
    captured = [scale_program("one", {"a": WEIGHTS["a"]}), scale_program("two", WEIGHTS)]
    return write_artifact(tmp_path / "entry", manifest(), captured)


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def forge(directory: Path, relative: str, content: bytes, group: str, name: str) -> None:
    """Replace a file and give the manifest the digest of the forgery."""
    (directory / relative).write_bytes(content)
    entry = {"path": relative, "size": len(content), "blake3": digest(content)}
    edit_manifest(directory, lambda document: document[group].update({name: entry}))
