# SPDX-License-Identifier: Apache-2.0
"""The compile cache: artifacts under one root, found by what they depend on, never by path.

``<root>/<model>-<content digest>/<signature>/`` is an artifact. An entry is written aside and
renamed into place, so it is there whole or not at all; programs may be added to it later.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import Logger
from pathlib import Path

import blake3
from filelock import FileLock, Timeout

from rbln_host.compiler.artifact import MANIFEST, Artifact, Manifest, write_artifact
from rbln_host.compiler.capture import Captured
from rbln_host.errors import ArtifactError

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class CacheKey:
    """What an artifact's contents depend on: name of each part -> its value.

    ``model_content`` is required: the digest of the model's configuration and weights.
    """

    label: str
    parts: Mapping[str, str]

    def __post_init__(self) -> None:
        if "model_content" not in self.parts:
            raise ValueError("a cache key needs the part 'model_content'")

    @property
    def signature(self) -> str:
        text = json.dumps(dict(self.parts), sort_keys=True)
        return blake3.blake3(text.encode()).hexdigest()[:16]

    @property
    def directory(self) -> Path:
        """Relative to the cache root."""
        safe = _UNSAFE.sub("_", self.label).strip("._")[:80] or "model"
        return Path(f"{safe}-{self.parts['model_content'][:8]}") / self.signature

    def differences(self, other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
        """Parts whose values differ: name -> (theirs, ours)."""
        names = sorted({*self.parts, *other})
        pairs = {name: (other.get(name), self.parts.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class ArtifactCache:
    """All cached artifacts below ``root``."""

    def __init__(self, root: Path, logger: Logger) -> None:
        self.root, self._logger = root, logger

    def path(self, key: CacheKey) -> Path:
        return self.root / key.directory

    @contextmanager
    def locked(self, key: CacheKey) -> Iterator[None]:
        """Hold the entry for compiling. Another process that compiles it is waited for.

        Raises OSError when the root cannot be written to.
        """
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._logger.info("Another process is compiling %s; waiting for it", path)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def find(self, key: CacheKey) -> Artifact | None:
        """The entry of ``key``, checked; None, with the reason logged, when there is none."""
        path = self.path(key)
        if not path.exists():
            self._explain_miss(key)
            return None
        try:
            artifact = Artifact.open(path)
            if dict(artifact.manifest.key) != dict(key.parts):
                raise ArtifactError(f"{path} belongs to another key")
        except ArtifactError as error:
            self._logger.warning("Compile cache: %s; the entry is rebuilt", error)
            return None
        self._logger.info("Compile cache: found %s", path)
        return artifact

    def store(self, key: CacheKey, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
        """Put a new entry in place, replacing a damaged one. Call with the lock held."""
        path = self.path(key)
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            artifact = write_artifact(aside, replace(manifest, key=dict(key.parts)), captured)
            if path.exists():
                shutil.rmtree(path)
            aside.rename(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._logger.info("Compile cache: stored %s", path)
        return Artifact(path, artifact.manifest)

    def extend(self, artifact: Artifact, captured: Iterable[Captured]) -> Artifact:
        """Add programs to an entry. Call with the lock held."""
        return write_artifact(artifact.directory, artifact.manifest, captured)

    def entries(self) -> list[Artifact]:
        """Every entry whose manifest reads, by path; contents are not verified."""
        found = []
        for manifest in sorted(self.root.glob(f"*/*/{MANIFEST}")):
            if manifest.parent.name.startswith("."):
                continue
            try:
                found.append(Artifact(manifest.parent, Manifest.from_json(manifest.read_text())))
            except (ArtifactError, OSError, UnicodeDecodeError):
                continue
        return found

    def _explain_miss(self, key: CacheKey) -> None:
        """Log which parts differ from the entry that is nearest to ``key``."""
        candidates = [(key.differences(a.manifest.key), a) for a in self.entries()]
        if not candidates:
            self._logger.info("Compile cache: %s is empty", self.root)
            return
        differences, nearest = min(candidates, key=lambda pair: len(pair[0]))
        changes = "; ".join(
            f"{name}: cached {theirs!r}, wanted {ours!r}"
            for name, (theirs, ours) in differences.items()
        )
        self._logger.info(
            "Compile cache: no entry for this configuration; nearest is %s, which differs in %s",
            nearest.directory,
            changes,
        )
