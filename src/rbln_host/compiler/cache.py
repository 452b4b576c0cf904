# SPDX-License-Identifier: Apache-2.0
"""The compile cache: artifacts under one root, found by what they depend on, never by path.

``<root>/<model content>/<signature>/`` is an artifact. An entry is written aside and renamed into
place, so it is there whole or not at all; programs may be added to it later.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import Logger
from pathlib import Path

from filelock import FileLock, Timeout

from rbln_host.compiler.artifact import Artifact, write_artifact
from rbln_host.compiler.capture import Captured
from rbln_host.compiler.digests import DigestMemo
from rbln_host.compiler.files import aside, digest
from rbln_host.compiler.manifest import MANIFEST, Manifest
from rbln_host.errors import ArtifactError, CacheBusyError

DIGESTS = "digests.json"
_DIGEST = re.compile(r"[A-Za-z0-9]{8,}")


@dataclass(frozen=True)
class CacheKey:
    """What an artifact's contents depend on: name of each part -> its value.

    ``model_content`` is required: the digest of the model's configuration and weights. ``label``
    is the model's name for people; it is no part of the key, since the same model may be called
    differently elsewhere. Raises ValueError for other parts than strings.
    """

    label: str
    parts: Mapping[str, str]

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.parts.get("model_content", "")):
            raise ValueError("a cache key needs the part 'model_content', a digest")
        wrong = [name for name, value in self.parts.items() if not isinstance(value, str)]
        if wrong:
            raise ValueError(f"parts of a cache key are strings; {wrong[0]!r} is not")

    @property
    def signature(self) -> str:
        return digest(json.dumps(dict(self.parts), sort_keys=True).encode())[:16]

    @property
    def directory(self) -> Path:
        """Relative to the cache root."""
        return Path(self.parts["model_content"][:16]) / self.signature

    def differences(self, other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
        """Parts whose values differ: name -> (theirs, ours)."""
        names = sorted({*self.parts, *other})
        pairs = {name: (other.get(name), self.parts.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class ArtifactCache:
    """All cached artifacts below ``root``."""

    def __init__(self, root: Path, logger: Logger) -> None:
        self.root, self._logger = root, logger
        self._digests = DigestMemo(root / DIGESTS)

    def digest(self, file: Path) -> str:
        """BLAKE3 of a file's content, remembered while the file stays as it is."""
        return self._digests.digest(file)

    def path(self, key: CacheKey) -> Path:
        return self.root / key.directory

    @contextmanager
    def locked(self, key: CacheKey) -> Iterator[None]:
        """Hold the entry for compiling. Another process that compiles it is waited for.

        A root that cannot be written to (a shared, read-only one) needs no lock: it is used as it
        is, and ``store`` will raise OSError.
        """
        path = self.path(key)
        lock = _lock(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            self._logger.info("Another process is compiling %s; waiting for it", path)
            lock.acquire()
        except OSError as error:
            self._logger.warning("Compile cache: %s cannot be written to: %s", self.root, error)
        try:
            yield
        finally:
            lock.release()

    def find(self, key: CacheKey) -> Artifact | None:
        """The entry of ``key``, checked; None, with the reason logged, when there is none."""
        path = self.path(key)
        try:
            path.stat()
            artifact = self._open(key)
        except FileNotFoundError:
            self._explain_miss(key)
            return None
        except (ArtifactError, OSError) as error:
            self._logger.warning("Compile cache: %s; the entry is rebuilt", error)
            return None
        self._logger.info("Compile cache: found %s", path)
        return artifact

    def store(self, key: CacheKey, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
        """Put an entry in place, replacing a damaged one and adding to one that is sound.

        Call with the lock held. Raises OSError when the disk does.
        """
        items = list(captured)
        try:
            return self.extend(self._open(key), items)
        except ArtifactError:
            pass  # there is none, or it cannot be used
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        directory = aside(path)
        manifest = replace(manifest, key=dict(key.parts), label=key.label)
        try:
            artifact = write_artifact(directory, manifest, items)
            _discard(path)
            directory.rename(path)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._logger.info("Compile cache: stored %s", path)
        return Artifact(path, artifact.manifest)

    def extend(self, artifact: Artifact, captured: Iterable[Captured]) -> Artifact:
        """Add programs to an entry, beside what other processes added to it.

        Call with the lock held. Raises ArtifactError when the entry is gone, OSError when the
        disk raises it.
        """
        current = Artifact.read(artifact.directory)
        return write_artifact(current.directory, current.manifest, captured)

    def remove(self, artifact: Artifact) -> None:
        """Delete an entry. Processes that run from it keep what they have loaded.

        Raises CacheBusyError while a process compiles it, OSError when the disk does.
        """
        try:
            with _lock(artifact.directory).acquire(timeout=0):
                _discard(artifact.directory)
        except Timeout as error:
            raise CacheBusyError(f"{artifact.directory} is being compiled") from error

    def entries(self) -> list[Artifact]:
        """Every entry whose manifest reads, by path; contents are not verified."""
        found = []
        for manifest in sorted(self.root.glob(f"*/*/{MANIFEST}")):
            if manifest.parent.name.startswith("."):
                continue
            try:
                found.append(Artifact.read(manifest.parent))
            except ArtifactError:
                continue
        return found

    def _open(self, key: CacheKey) -> Artifact:
        """Raises ArtifactError when the entry is missing, damaged or another key's."""
        artifact = Artifact.open(self.path(key), self.digest)
        differences = key.differences(artifact.manifest.key)
        if differences:
            names = ", ".join(differences)
            raise ArtifactError(f"{artifact.directory} belongs to another key: {names} differ")
        return artifact

    def _explain_miss(self, key: CacheKey) -> None:
        """Log which parts differ from the entry that is nearest to ``key``."""
        candidates = [(key.differences(a.manifest.key), a) for a in self.entries()]
        if not candidates:
            self._logger.info("Compile cache: %s is empty", self.root)
            return
        # Of equally near entries one of the same model says more.
        differences, nearest = min(candidates, key=lambda c: (len(c[0]), "model_content" in c[0]))
        changes = "; ".join(
            f"{name}: cached {theirs!r}, wanted {ours!r}"
            for name, (theirs, ours) in differences.items()
        )
        self._logger.info(
            "Compile cache: no entry for this configuration; nearest is %s, which differs in %s",
            nearest.directory,
            changes,
        )


def _lock(entry: Path) -> FileLock:
    return FileLock(f"{entry}.lock")


def _discard(entry: Path) -> None:
    """Remove an entry if it is there, so that no reader finds half of it."""
    doomed = aside(entry)
    try:
        entry.rename(doomed)
    except FileNotFoundError:
        return
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed)
    else:
        doomed.unlink()
