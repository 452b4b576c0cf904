# SPDX-License-Identifier: Apache-2.0
"""The manifest: what an artifact is, what made it, and the digest of every file in it."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from rbln_host.compiler.graph import TensorSpec
from rbln_host.compiler.pack import Layout
from rbln_host.compiler.serial import dtype_from_name, dtype_name
from rbln_host.errors import ArtifactError

FORMAT = 2
MANIFEST = "rbln_config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CONTENT = re.compile(r"[0-9a-f]{32}")


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
class WeightEntry:
    """A weight: what it is and in which layouts it is stored. Names of equal content share them.

    Raises ArtifactError for a digest, dtype, shape or layout that is none.
    """

    content: str
    """Digest of dtype, shape and elements."""
    dtype: str
    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]

    def __post_init__(self) -> None:
        _check("content", self.content, str)
        if not _CONTENT.fullmatch(self.content) or not self.layouts:
            raise ArtifactError(f"a weight has a digest and a layout, not {self!r:.200}")
        try:
            shapes = [layout.shape(self.spec) for layout in self.layouts]
        except (ValueError, LookupError, TypeError) as error:
            raise ArtifactError(f"{self!r:.200} is no weight: {error!r:.200}") from error
        if any(axis < 0 for shape in shapes for axis in shape):
            raise ArtifactError(f"{self!r:.200} has no fixed shape")

    @classmethod
    def of(cls, content: str, spec: TensorSpec, *layouts: Layout) -> "WeightEntry":
        return cls(content, dtype_name(spec.dtype), spec.shape, layouts)

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "WeightEntry":
        """Raises ArtifactError, ValueError or TypeError for anything that is not one."""
        layouts, shape = item.pop("layouts"), item.pop("shape")
        if not all(type(axis) is int for axis in shape):
            raise TypeError("a shape is a list of integers")
        return cls(**item, shape=tuple(shape), layouts=tuple(Layout(name) for name in layouts))

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, dtype_from_name(self.dtype))

    def key(self, layout: Layout) -> str:
        """Name of the stored tensor in the weight files."""
        return f"{self.content}.{layout}"


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
    tensors: dict[str, WeightEntry] = field(default_factory=dict)
    """Weight name -> what is stored in those files."""
    attachments: dict[str, FileEntry] = field(default_factory=dict)
    """Files of tensors that no program has as weights, by the name that the plugin gave them."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("toolchain", "toolchain_version", "profile", "label"):
            _check(name, getattr(self, name), str)
        _check("num_devices", self.num_devices, int)
        for name in ("key", "model", "programs", "weights", "tensors", "attachments"):
            _check(name, getattr(self, name), dict)
        for part, value in self.key.items():
            _check(f"key part {part}", value, str)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file beside the manifest."""
        return (*self.programs.values(), *self.weights.values(), *self.attachments.values())

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
            document.setdefault("attachments", {})
            for group in ("programs", "weights", "attachments"):
                document[group] = {k: FileEntry(**v) for k, v in document[group].items()}
            tensors = document["tensors"].items()
            document["tensors"] = {k: WeightEntry.from_json(v) for k, v in tensors}
            return cls(**document)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ArtifactError(f"{MANIFEST} is not a manifest: {error!r:.200}") from error


def _check(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of {kind}, not {type(value)}")
