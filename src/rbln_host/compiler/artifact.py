# SPDX-License-Identifier: Apache-2.0
"""The artifact: a directory with a manifest, one file per program and the weights once.

::

    rbln_config.json            manifest: what this is, what made it, digests of every file
    programs/<name>.json        one program each
    weights/<n>.safetensors     weights, shared by all programs and memory-mapped

Everything is data. A file that is missing, truncated or altered is an :class:`ArtifactError`.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rbln_host.compiler.capture import Captured
from rbln_host.compiler.graph import Graph
from rbln_host.compiler.serial import dumps, loads
from rbln_host.errors import ArtifactError

FORMAT = 1
MANIFEST = "rbln_config.json"
SHARD_BYTES = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class FileEntry:
    """One file of the artifact, relative to its directory."""

    path: str
    size: int
    blake3: str

    def __post_init__(self) -> None:
        parts = Path(self.path).parts
        if not parts or not all(_NAME.fullmatch(part) for part in parts):
            raise ArtifactError(f"file name {self.path!r} is not a plain relative path")


@dataclass(frozen=True)
class Manifest:
    """What the artifact is. ``key`` holds what its contents depend on; ``model`` is free-form
    JSON that the plugin needs to serve it without the original model."""

    toolchain: str
    toolchain_version: str
    profile: str
    num_devices: int
    key: dict[str, str]
    model: dict[str, Any]
    programs: dict[str, FileEntry] = field(default_factory=dict)
    weights: dict[str, FileEntry] = field(default_factory=dict)
    """Shard number -> file."""
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ArtifactError for text that is not a manifest of this format."""
        try:
            document = json.loads(text)
            if document.get("format") != FORMAT:
                raise ArtifactError(
                    f"manifest format {document.get('format')!r} is not {FORMAT}: "
                    "it was made by another version"
                )
            for group in ("programs", "weights"):
                document[group] = {k: FileEntry(**v) for k, v in document[group].items()}
            return cls(**document)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ArtifactError(f"{MANIFEST} is not a manifest: {error!r}") from error


class Artifact:
    """An artifact on disk, opened for reading. All files are checked when it is opened."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    @classmethod
    def open(cls, directory: Path) -> "Artifact":
        """Raises ArtifactError when a file is missing, truncated or altered."""
        try:
            text = (directory / MANIFEST).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{directory}: no readable {MANIFEST}: {error}") from error
        artifact = cls(directory, Manifest.from_json(text))
        artifact.verify()
        return artifact

    def verify(self) -> None:
        """Compare every file's size and BLAKE3 digest with the manifest."""
        for entry in (*self.manifest.programs.values(), *self.manifest.weights.values()):
            path = self._path(entry)
            if not path.is_file():
                raise ArtifactError(f"{path} is missing")
            if path.stat().st_size != entry.size or digest_file(path) != entry.blake3:
                raise ArtifactError(f"{path} is truncated or altered")

    @property
    def program_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.manifest.programs))

    def program(self, name: str) -> Graph:
        """Raises KeyError for a program that is not here."""
        return loads(self._path(self.manifest.programs[name]).read_bytes())

    def weights(self) -> dict[str, Tensor]:
        """Every weight, memory-mapped: pages are read on first use and shared by processes."""
        loaded: dict[str, Tensor] = {}
        for entry in self.manifest.weights.values():
            with safe_open(self._path(entry), framework="pt") as shard:
                loaded.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
        return loaded

    def _path(self, entry: FileEntry) -> Path:
        path = self.directory / entry.path
        if not path.resolve().is_relative_to(self.directory.resolve()):
            raise ArtifactError(f"{path} leads out of the artifact")
        return path


def write_artifact(directory: Path, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
    """Add programs and the weights they need to ``directory``; the manifest is replaced last.

    Existing programs and weights named by ``manifest`` stay. Raises OSError when the disk does.
    """
    (directory / "programs").mkdir(parents=True, exist_ok=True)
    (directory / "weights").mkdir(exist_ok=True)
    items = list(captured)
    known = Artifact(directory, manifest).weights()
    missing = {n: t for item in items for n, t in item.weights.items() if n not in known}
    programs = {item.graph.name: _write_program(directory, item.graph) for item in items}
    manifest = replace(
        manifest,
        programs={**manifest.programs, **programs},
        weights={**manifest.weights, **_write_weights(directory, manifest, missing)},
    )
    write_atomically(directory / MANIFEST, manifest.to_json().encode())
    return Artifact(directory, manifest)


def _write_program(directory: Path, graph: Graph) -> FileEntry:
    path = directory / "programs" / f"{graph.name}.json"
    write_atomically(path, dumps(graph))
    return _entry(directory, path)


def _write_weights(
    directory: Path, manifest: Manifest, weights: Mapping[str, Tensor]
) -> dict[str, FileEntry]:
    written = {}
    for number, shard in enumerate(_shards(weights), start=len(manifest.weights)):
        path = directory / "weights" / f"{number:05d}.safetensors"
        save_file(shard, path)
        written[str(number)] = _entry(directory, path)
    return written


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Groups of about ``SHARD_BYTES``, so that writing needs little memory beside the weights."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _entry(directory: Path, path: Path) -> FileEntry:
    relative = path.relative_to(directory).as_posix()
    return FileEntry(relative, path.stat().st_size, digest_file(path))


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's content, on all cores."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    if path.stat().st_size:
        hasher.update_mmap(path)
    return str(hasher.hexdigest())


def write_atomically(path: Path, data: bytes) -> None:
    """Write aside and rename: a reader sees the old file or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
