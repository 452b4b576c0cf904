# SPDX-License-Identifier: Apache-2.0
"""The artifact: a directory with a manifest, one file per program and the weights once.

::

    rbln_config.json            manifest: what this is, what made it, digests of every file,
                                shape and layouts of every weight
    programs/<name>.json        one lowered program each
    weights/<n>.safetensors     weights, packed once for all programs and memory-mapped
    <folder>/<digest>.safetensors
                                attachments: further tensors, that the plugin reads

Everything is data. A weight's file key is a digest of its content, so that names of equal content
share what is stored. A file that is missing, truncated or altered is an :class:`ArtifactError`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from rbln_host.compiler.capture import Captured
from rbln_host.compiler.digests import DigestOf
from rbln_host.compiler.files import digest, digest_file, write_atomically
from rbln_host.compiler.graph import Graph
from rbln_host.compiler.lowering import lowered
from rbln_host.compiler.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from rbln_host.compiler.serial import dumps, loads
from rbln_host.compiler.storing import plan_weights
from rbln_host.compiler.weight_files import Pending, read_weight_file, write_weight_file
from rbln_host.compiler.weights import Weight
from rbln_host.errors import ArtifactError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SHARD_BYTES",
    "Artifact",
    "FileEntry",
    "Manifest",
    "digest_file",
    "write_artifact",
    "write_atomically",
    "write_attachment",
]

SHARD_BYTES = 1 << 30


class Artifact:
    """An artifact on disk, opened for reading."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    @classmethod
    def open(cls, directory: Path, digest_of: DigestOf | None = None) -> "Artifact":
        """Raises ArtifactError when a file is missing, truncated or altered, or when the weights
        are not those that the manifest lists."""
        artifact = cls.read(directory)
        artifact.verify(digest_of)
        artifact.weights()  # maps them and compares shapes, but reads none
        return artifact

    @classmethod
    def read(cls, directory: Path) -> "Artifact":
        """Read the manifest only; ArtifactError when there is none."""
        try:
            text = (directory / MANIFEST).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{directory}: no readable {MANIFEST}: {error}") from error
        return cls(directory, Manifest.from_json(text))

    def verify(self, digest_of: DigestOf | None = None) -> None:
        """Compare every file's size and BLAKE3 digest with the manifest."""
        digest_of = digest_of or digest_file
        for entry in self.manifest.files:
            path = self._path(entry)
            try:
                if not path.is_file():
                    raise ArtifactError(f"{path} is missing")
                intact = path.stat().st_size == entry.size and digest_of(path) == entry.blake3
            except OSError as error:
                raise ArtifactError(f"{path} cannot be read: {error}") from error
            if not intact:
                raise ArtifactError(f"{path} is truncated or altered")

    @property
    def program_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.manifest.programs))

    @property
    def nbytes(self) -> int:
        """Size of all files that the manifest names."""
        return sum(entry.size for entry in self.manifest.files)

    @property
    def written_at(self) -> float:
        """When the manifest was last written, in seconds since the epoch; OSError if it is gone."""
        return (self.directory / MANIFEST).stat().st_mtime

    def program(self, name: str) -> Graph:
        """Raises KeyError for a program that is not here, ArtifactError for a damaged one."""
        entry = self.manifest.programs[name]
        path = self._path(entry)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error}") from error
        if digest(data) != entry.blake3:
            raise ArtifactError(f"{path} is truncated or altered")
        graph = loads(data)
        if graph.name != name:
            raise ArtifactError(f"{path} holds the program {graph.name!r}, not {name!r}")
        return graph

    def weights(self) -> dict[str, Weight]:
        """Every weight, memory-mapped: pages are read on first use and shared by processes.

        Raises ArtifactError when a file cannot be read or lacks what the manifest promises.
        """
        stored: dict[str, Tensor] = {}
        for entry in self.manifest.weights.values():
            stored.update(read_weight_file(self._path(entry)))
        return {name: self._weight(name, stored) for name in self.manifest.tensors}

    def attachment(self, name: str) -> dict[str, Tensor]:
        """The tensors of an attachment, memory-mapped.

        Raises KeyError for one that is not here, ArtifactError for a file that cannot be read.
        """
        return read_weight_file(self._path(self.manifest.attachments[name]))

    def _weight(self, name: str, stored: Mapping[str, Tensor]) -> Weight:
        entry = self.manifest.tensors[name]
        try:
            copies = {layout: stored[entry.key(layout)] for layout in entry.layouts}
            return Weight(entry.spec, copies)
        except (KeyError, ValueError) as error:
            raise ArtifactError(f"{self.directory}: weight {name!r}: {error!r:.200}") from error

    def _path(self, entry: FileEntry) -> Path:
        path = self.directory / entry.path
        try:
            inside = path.resolve().is_relative_to(self.directory.resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
            raise ArtifactError(f"{path} cannot be read: {error}") from error
        if not inside:
            raise ArtifactError(f"{path} leads out of the artifact")
        return path


def write_artifact(directory: Path, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
    """Add programs, lowered, and the weights they need to ``directory``; the manifest is replaced
    last.

    Existing programs and weights named by ``manifest`` stay. Raises OSError when the disk does,
    ValueError when two different weights have one name.
    """
    (directory / "programs").mkdir(parents=True, exist_ok=True)
    (directory / "weights").mkdir(exist_ok=True)
    items = lowered(captured)
    wanted = plan_weights(items, manifest.tensors)
    programs = {item.graph.name: _write_program(directory, item.graph) for item in items}
    manifest = replace(
        manifest,
        programs={**manifest.programs, **programs},
        weights={**manifest.weights, **_write_weights(directory, manifest, wanted.pending)},
        tensors={**manifest.tensors, **wanted.entries},
    )
    write_atomically(directory / MANIFEST, manifest.to_json().encode())
    return Artifact(directory, manifest)


def write_attachment(directory: Path, folder: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors to ``folder`` in an artifact's directory, under the digest of what is written:
    equal content is one file.

    The entry belongs into the ``attachments`` of the artifact's manifest. OSError when the disk
    raises it.
    """
    data = save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})
    content = digest(data)
    entry = FileEntry(f"{folder}/{content}.safetensors", len(data), content)
    (directory / folder).mkdir(parents=True, exist_ok=True)
    write_atomically(directory / entry.path, data)
    return entry


def _write_program(directory: Path, graph: Graph) -> FileEntry:
    data = dumps(graph)
    entry = FileEntry(f"programs/{graph.name}.json", len(data), digest(data))
    write_atomically(directory / entry.path, data)
    return entry


def _write_weights(
    directory: Path, manifest: Manifest, pending: Iterable[Pending]
) -> dict[str, FileEntry]:
    written = {}
    for number, shard in enumerate(_shards(pending), start=len(manifest.weights)):
        path = directory / "weights" / f"{number:05d}.safetensors"
        write_weight_file(path, shard)
        relative = path.relative_to(directory).as_posix()
        written[str(number)] = FileEntry(relative, path.stat().st_size, digest_file(path))
    return written


def _shards(pending: Iterable[Pending]) -> Iterator[list[Pending]]:
    """Files of about ``SHARD_BYTES``."""
    shard: list[Pending] = []
    size = 0
    for item in pending:
        if shard and size + item.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.nbytes
    if shard:
        yield shard
