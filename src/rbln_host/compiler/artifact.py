# SPDX-License-Identifier: Apache-2.0
"""The artifact: a directory with a manifest, one file per program and the weights once.

::

    rbln_config.json            manifest: what this is, what made it, digests of every file
    programs/<name>.json        one program each
    weights/<n>.safetensors     weights, shared by all programs and memory-mapped

Everything is data. A file that is missing, truncated or altered is an :class:`ArtifactError`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rbln_host.compiler.capture import Captured, canonical_names
from rbln_host.compiler.files import digest, digest_file, replacing, write_atomically
from rbln_host.compiler.graph import Graph
from rbln_host.compiler.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from rbln_host.compiler.serial import dumps, loads
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
]

SHARD_BYTES = 1 << 30


class Artifact:
    """An artifact on disk, opened for reading."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest

    @classmethod
    def open(cls, directory: Path) -> "Artifact":
        """Raises ArtifactError when a file is missing, truncated or altered."""
        artifact = cls.read(directory)
        artifact.verify()
        return artifact

    @classmethod
    def read(cls, directory: Path) -> "Artifact":
        """Read the manifest only; ArtifactError when there is none."""
        try:
            text = (directory / MANIFEST).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{directory}: no readable {MANIFEST}: {error}") from error
        return cls(directory, Manifest.from_json(text))

    def verify(self) -> None:
        """Compare every file's size and BLAKE3 digest with the manifest."""
        for entry in self.manifest.files:
            path = self._path(entry)
            try:
                if not path.is_file():
                    raise ArtifactError(f"{path} is missing")
                intact = path.stat().st_size == entry.size and digest_file(path) == entry.blake3
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

    def weights(self) -> dict[str, Tensor]:
        """Every weight, memory-mapped: pages are read on first use and shared by processes."""
        loaded: dict[str, Tensor] = {}
        for entry in self.manifest.weights.values():
            path = self._path(entry)
            try:
                with safe_open(path, framework="pt") as shard:
                    loaded.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ArtifactError(f"{path} cannot be read: {error}") from error
        return loaded

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
    """Add programs and the weights they need to ``directory``; the manifest is replaced last.

    Existing programs and weights named by ``manifest`` stay. Raises OSError when the disk does,
    ValueError when two different weights have one name.
    """
    (directory / "programs").mkdir(parents=True, exist_ok=True)
    (directory / "weights").mkdir(exist_ok=True)
    items = _one_name_each(list(captured))
    missing = _new_weights(items, Artifact(directory, manifest).weights())
    programs = {item.graph.name: _write_program(directory, item.graph) for item in items}
    manifest = replace(
        manifest,
        programs={**manifest.programs, **programs},
        weights={**manifest.weights, **_write_weights(directory, manifest, missing)},
    )
    write_atomically(directory / MANIFEST, manifest.to_json().encode())
    return Artifact(directory, manifest)


def _one_name_each(items: list[Captured]) -> list[Captured]:
    """Rename weights so that the same memory has one name in all programs (tied weights)."""
    names = canonical_names(pair for item in items for pair in item.weights.items())
    return [
        Captured(
            replace(
                item.graph,
                weights={value: names[weight] for value, weight in item.graph.weights.items()},
            ),
            {names[weight]: tensor for weight, tensor in item.weights.items()},
        )
        for item in items
    ]


def _new_weights(items: Iterable[Captured], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that ``known`` lacks. ValueError when a name stands for two different weights."""
    new: dict[str, Tensor] = {}
    for item in items:
        for name, tensor in item.weights.items():
            if name in known:
                # Of stored weights the content is vouched for by the artifact's key.
                same = _alike(known[name], tensor)
            else:
                same = _same(new.setdefault(name, tensor), tensor)
            if not same:
                raise ValueError(f"two different weights are called {name!r}")
    return new


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit (a NaN equals itself)."""
    return one is other or (_alike(one, other) and torch.equal(_raw(one), _raw(other)))


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _write_program(directory: Path, graph: Graph) -> FileEntry:
    data = dumps(graph)
    entry = FileEntry(f"programs/{graph.name}.json", len(data), digest(data))
    write_atomically(directory / entry.path, data)
    return entry


def _write_weights(
    directory: Path, manifest: Manifest, weights: Mapping[str, Tensor]
) -> dict[str, FileEntry]:
    written = {}
    for number, shard in enumerate(_shards(weights), start=len(manifest.weights)):
        path = directory / "weights" / f"{number:05d}.safetensors"
        with replacing(path) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(shard, temporary)  # makes it readable by its owner only
            temporary.chmod(mode)
        relative = path.relative_to(directory).as_posix()
        written[str(number)] = FileEntry(relative, path.stat().st_size, digest_file(path))
    return written


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Groups of about ``SHARD_BYTES``, so that writing needs little memory beside the weights."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = _storable(tensor, shard)
        size += tensor.nbytes
    if shard:
        yield shard


def _storable(tensor: Tensor, shard: Mapping[str, Tensor]) -> Tensor:
    """Contiguous, and copied if it is a view of memory that the shard already holds."""
    pointer = tensor.untyped_storage().data_ptr()
    taken = pointer and any(t.untyped_storage().data_ptr() == pointer for t in shard.values())
    return tensor.clone(memory_format=torch.contiguous_format) if taken else tensor.contiguous()
