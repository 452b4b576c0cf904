# SPDX-License-Identifier: Apache-2.0
"""The toolchain boundary: everything the plugin asks of a compiler and its runtime.

Only this module knows a toolchain. A vendor's compiler is added by a second adapter that offers
the same protocol; nothing above changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from logging import Logger
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import rbln_host.compiler
import rbln_host.ops
from rbln_host.compiler.adapters import (
    RANKS_INPUT,
    SLOTS_INPUT,
    AdaptedModule,
    Adapters,
    a_input,
    b_input,
)
from rbln_host.compiler.artifact import (
    Artifact,
    FileEntry,
    Manifest,
    write_artifact,
    write_attachment,
)
from rbln_host.compiler.cache import ArtifactCache, CacheKey
from rbln_host.compiler.capture import Captured, Capturer
from rbln_host.compiler.graph import TensorSpec
from rbln_host.errors import ArtifactError, CaptureError, MissingProgramError, ToolchainError
from rbln_host.ops import NO_ADAPTER, PADDING_POSITION, PADDING_ROW, PADDING_SLOT
from rbln_host.ops.lora import pack_b
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.native import compiler_of
from rbln_host.runtime.options import Executor, ExecutorOptions
from rbln_host.runtime.report import ProgramReport, explain
from rbln_host.runtime.weight_store import WeightStore
from rbln_vllm import envs
from rbln_vllm.sources import digest_packages

__all__ = [
    "NO_ADAPTER",
    "PADDING_POSITION",
    "PADDING_ROW",
    "PADDING_SLOT",
    "RANKS_INPUT",
    "SLOTS_INPUT",
    "AdaptedModule",
    "Adapters",
    "Artifact",
    "ArtifactError",
    "CacheKey",
    "CaptureError",
    "Captured",
    "Executable",
    "FileEntry",
    "HostToolchain",
    "Manifest",
    "MissingProgramError",
    "ModuleCompiler",
    "ProgramCache",
    "ProgramReport",
    "TensorSpec",
    "Toolchain",
    "ToolchainError",
    "a_input",
    "b_input",
    "check_executor",
    "host_toolchain",
    "pack_b",
    "write_attachment",
]


class ProgramCache(Protocol):
    """Artifacts kept between starts."""

    root: Path

    def digest(self, file: Path) -> str: ...

    def path(self, key: CacheKey) -> Path: ...

    def locked(self, key: CacheKey) -> AbstractContextManager[None]: ...

    def find(self, key: CacheKey) -> Artifact | None: ...

    def store(
        self, key: CacheKey, manifest: Manifest, captured: Iterable[Captured]
    ) -> Artifact: ...

    def extend(self, artifact: Artifact, captured: Iterable[Captured]) -> Artifact: ...

    def remove(self, artifact: Artifact) -> None: ...

    def entries(self) -> list[Artifact]: ...


class ModuleCompiler(Protocol):
    """Compiles programs that compute with the weights of one module."""

    def capture(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Tensor],
        name: str,
        free_axes: Mapping[str, int] | None = None,
        adapters: Adapters | None = None,
    ) -> Captured:
        """Compile ``function(**inputs)`` for the sizes of its inputs, whose values do not matter.

        ``free_axes`` names the one axis of an input whose size may change at run time (the KV
        pool's number of blocks). With ``adapters`` the program has further inputs that hold them;
        its first input is then of its tokens. CaptureError when the function cannot be compiled.
        """
        ...


class Toolchain(Protocol):
    """A compiler and its runtime."""

    name: str
    version: str

    def compiler(self, module: torch.nn.Module) -> ModuleCompiler:
        """What compiles functions that call ``module``."""
        ...

    def cache(self, root: Path, logger: Logger) -> ProgramCache:
        """The compile cache below ``root``."""
        ...

    def write(self, directory: Path, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
        """Write programs and the weights they need to a directory; OSError when the disk does."""
        ...

    def new_executable(self) -> Executable:
        """An empty executable, to which artifacts and programs are added."""
        ...

    def explain(self, artifact: Artifact) -> dict[str, ProgramReport]:
        """Cost and native share of each program in an artifact.

        ToolchainError when the artifact is damaged or this machine cannot run it.
        """
        ...


class HostToolchain:
    """``rbln_host``: the open toolchain, which runs programs on this machine's CPU."""

    name = "rbln_host"
    version = rbln_host.__version__

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options

    def compiler(self, module: torch.nn.Module) -> ModuleCompiler:
        return Capturer(module)

    def cache(self, root: Path, logger: Logger) -> ProgramCache:
        return ArtifactCache(root, logger)

    def write(self, directory: Path, manifest: Manifest, captured: Iterable[Captured]) -> Artifact:
        return write_artifact(directory, manifest, captured)

    def new_executable(self) -> Executable:
        return Executable(self._options)

    def explain(self, artifact: Artifact) -> dict[str, ProgramReport]:
        compiler, weights = compiler_of(self._options), WeightStore()
        weights.update(artifact.weights())
        graphs = (artifact.program(name) for name in artifact.program_names)
        return {graph.name: explain(graph, weights, compiler) for graph in graphs}


def host_toolchain(cpus: Sequence[int] = ()) -> Toolchain:
    """The toolchain of the ``HOST`` device and of every dry run.

    Its executables run one thread on each of ``cpus``; on every allowed one if none are given.
    """
    return HostToolchain(_options(cpus))


def check_executor() -> None:
    """Raises ToolchainError, with what to do, when this machine cannot run programs as the
    environment asks."""
    options = _options(())
    if options.executor is Executor.NATIVE:
        compiler_of(options)


def _options(cpus: Sequence[int]) -> ExecutorOptions:
    return ExecutorOptions(
        Executor(envs.host_executor()), tuple(cpus), envs.host_isa(), envs.host_spin_us()
    )


def compiled_with() -> dict[str, Any]:
    """What a compiled program depends on beside its model, for cache keys."""
    packages = (rbln_host.compiler, rbln_host.ops)
    return {"torch": torch.__version__, "compiler_code": digest_packages(packages)}
