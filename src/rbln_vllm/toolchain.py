# SPDX-License-Identifier: Apache-2.0
"""The toolchain boundary: everything the plugin asks of a compiler and its runtime.

Only this module knows a toolchain. A vendor's compiler is added by a second adapter that offers
the same protocol; nothing above changes.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from logging import Logger
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import rbln_host.compiler
import rbln_host.ops
from rbln_host.compiler.artifact import Artifact, Manifest
from rbln_host.compiler.batches import capture_batches
from rbln_host.compiler.cache import ArtifactCache, CacheKey
from rbln_host.compiler.capture import Captured
from rbln_host.errors import ArtifactError, CaptureError, MissingProgramError, ToolchainError
from rbln_host.ops import PADDING_POSITION, PADDING_SLOT
from rbln_host.runtime.executable import Executable
from rbln_vllm.sources import digest_packages

__all__ = [
    "PADDING_POSITION",
    "PADDING_SLOT",
    "Artifact",
    "ArtifactError",
    "CacheKey",
    "CaptureError",
    "Captured",
    "Executable",
    "HostToolchain",
    "Manifest",
    "MissingProgramError",
    "Toolchain",
    "ToolchainError",
    "host_toolchain",
]


class ProgramCache(Protocol):
    """Artifacts kept between starts."""

    root: Path

    def path(self, key: CacheKey) -> Path: ...

    def locked(self, key: CacheKey) -> AbstractContextManager[None]: ...

    def find(self, key: CacheKey) -> Artifact | None: ...

    def store(
        self, key: CacheKey, manifest: Manifest, captured: Iterable[Captured]
    ) -> Artifact: ...

    def extend(self, artifact: Artifact, captured: Iterable[Captured]) -> Artifact: ...

    def remove(self, artifact: Artifact) -> None: ...

    def entries(self) -> list[Artifact]: ...


class Toolchain(Protocol):
    """A compiler and its runtime."""

    name: str
    version: str

    def compile(
        self,
        module: torch.nn.Module,
        inputs: Mapping[str, Tensor],
        names: Mapping[int, str],
        batch_axes: Mapping[str, int],
        free_axes: Mapping[str, int],
    ) -> list[Captured]:
        """Compile ``module(**inputs)`` once for each batch size in ``names`` (size -> name).

        ``batch_axes`` names the batch axis of each input that has one, ``free_axes`` the one
        axis of an input whose size may change at run time (the KV pool's number of blocks).
        CaptureError when the module cannot be compiled.
        """
        ...

    def cache(self, root: Path, logger: Logger) -> ProgramCache:
        """The compile cache below ``root``."""
        ...

    def new_executable(self) -> Executable:
        """An empty executable, to which artifacts and programs are added."""
        ...


class HostToolchain:
    """``rbln_host``: the open toolchain, which runs programs on this machine's CPU."""

    name = "rbln_host"
    version = rbln_host.__version__

    def compile(
        self,
        module: torch.nn.Module,
        inputs: Mapping[str, Tensor],
        names: Mapping[int, str],
        batch_axes: Mapping[str, int],
        free_axes: Mapping[str, int],
    ) -> list[Captured]:
        return capture_batches(module, inputs, names, batch_axes, free_axes)

    def cache(self, root: Path, logger: Logger) -> ProgramCache:
        return ArtifactCache(root, logger)

    def new_executable(self) -> Executable:
        return Executable()


def host_toolchain() -> Toolchain:
    """The toolchain of the ``HOST`` device and of every dry run."""
    return HostToolchain()


def compiled_with() -> dict[str, Any]:
    """What a compiled program depends on beside its model, for cache keys."""
    packages = (rbln_host.compiler, rbln_host.ops)
    return {"torch": torch.__version__, "compiler_code": digest_packages(packages)}
