# SPDX-License-Identifier: Apache-2.0
"""The manifest: what an artifact is, what made it, and the digest of every file in it."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from rbln_host.errors import ArtifactError

FORMAT = 1
MANIFEST = "rbln_config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class FileEntry:
    """One file of the artifact, relative to its directory."""

    path: str
    size: int
    blake3: str

    def __post_init__(self) -> None:
        _check("path", self.path, str)
        _check("size", self.size, int)
        _check("blake3", self.blake3, str)
        if not all(_NAME.fullmatch(part) for part in self.path.split("/")):
            raise ArtifactError(f"file name {self.path!r} is not a plain relative path")


@dataclass(frozen=True)
class Manifest:
    """What the artifact is. ``key`` holds what its contents depend on; ``model`` is free-form
    JSON that the plugin needs to serve it without the original model; ``label`` is the model's
    name for people. Raises TypeError for a field of another type."""

    toolchain: str
    toolchain_version: str
    profile: str
    num_devices: int
    key: dict[str, str]
    model: dict[str, Any]
    label: str = ""
    programs: dict[str, FileEntry] = field(default_factory=dict)
    weights: dict[str, FileEntry] = field(default_factory=dict)
    """Shard number -> file."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("toolchain", "toolchain_version", "profile", "label"):
            _check(name, getattr(self, name), str)
        _check("num_devices", self.num_devices, int)
        for name in ("key", "model", "programs", "weights"):
            _check(name, getattr(self, name), dict)
        for part, value in self.key.items():
            _check(f"key part {part}", value, str)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file beside the manifest."""
        return (*self.programs.values(), *self.weights.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ArtifactError for text that is not a manifest of this format."""
        try:
            document = json.loads(text)
            if document.get("format") != FORMAT:
                raise ArtifactError(
                    f"manifest format {document.get('format')!r:.40} is not {FORMAT}: "
                    "it was made by another version"
                )
            for group in ("programs", "weights"):
                document[group] = {k: FileEntry(**v) for k, v in document[group].items()}
            return cls(**document)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ArtifactError(f"{MANIFEST} is not a manifest: {error!r:.200}") from error


def _check(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of {kind}, not {type(value)}")
