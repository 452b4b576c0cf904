# SPDX-License-Identifier: Apache-2.0
"""From program table to executable: take what the cache has, compile what it lacks."""

import gc
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from rbln_vllm import envs
from rbln_vllm.geometry import Geometry, options_of
from rbln_vllm.lora.shape import AdapterShape, modules_from_json, modules_to_json
from rbln_vllm.lora.stored import StoredAdapters
from rbln_vllm.metrics.counters import ProgramCounters
from rbln_vllm.models.content import cache_key
from rbln_vllm.models.kv_layers import KVLayer, layers_from_json, layers_to_json
from rbln_vllm.models.select import ModelBuilder, builder_of
from rbln_vllm.optimum.directory import CompiledDirectory
from rbln_vllm.optimum.serving import compiled_path
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import (
    Adapters,
    Artifact,
    CacheKey,
    Captured,
    CaptureError,
    Executable,
    Manifest,
    MissingProgramError,
    Toolchain,
    ToolchainError,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.rbln.programs")


class ProgramsMissingError(RuntimeError):
    """Start-up was told not to compile, and programs are missing."""


@dataclass(frozen=True)
class StorePolicy:
    """What may be compiled, and when."""

    warm_up: bool
    """Compile every program at start; otherwise each at its first use."""
    strict: bool
    """Never compile after ready: refuse the request that would need it."""
    require_precompiled: bool
    """Never compile at all."""
    use_cache: bool

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "StorePolicy":
        options = options_of(vllm_config)
        return cls(
            warm_up=envs.enable_warm_up(),
            strict=options.strict_programs,
            require_precompiled=options.require_precompiled,
            use_cache=not envs.compile_cache_disabled(),
        )


class ProgramStore:
    """The programs of one worker.

    ``executable`` holds those loaded so far and ``kv_layers`` what the KV pool must hold.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        geometry: Geometry,
        toolchain: Toolchain,
        counters: ProgramCounters,
    ) -> None:
        self._config, self._geometry, self._toolchain = vllm_config, geometry, toolchain
        self._policy, self._counters = StorePolicy.of(vllm_config), counters
        self._cache = toolchain.cache(envs.cache_root() / "rbln", logger)
        self._builder: ModelBuilder | None = None
        self._compiled = compiled_path(vllm_config)
        self._key: CacheKey | None = None
        self._artifact: Artifact | None = None
        self.executable: Executable = toolchain.new_executable()
        self.kv_layers: tuple[KVLayer, ...] = ()
        self._adapter_shape = AdapterShape.of(vllm_config)
        self.adapters: Adapters | None = None
        """The linears that have adapters; None without ``--enable-lora``."""
        self.stored_adapters: StoredAdapters | None = None
        """The adapters of a compiled directory."""

    def prepare(self) -> None:
        """Make every program of the table available, as far as the policy says.

        Raises ProgramsMissingError under ``require_precompiled``, CaptureError for a model that
        cannot be compiled.
        """
        started = time.perf_counter()
        wanted = self._geometry.table.programs
        if self._compiled is not None:
            self._open_compiled(self._compiled, wanted)
        elif self._policy.use_cache and self._cache_writable():
            self._key = cache_key(self._config, self._toolchain, self._cache.digest)
        with self._lock():
            self._open_entry()
            self._fill(wanted)
        self._counters.set_total(len(wanted))
        logger.info(
            "Programs: %d of %d available after %.1f s",
            sum(key.name in self.executable.program_names for key in wanted),
            len(wanted),
            time.perf_counter() - started,
        )

    def mark_ready(self) -> None:
        """Start-up is over: free the model, with its copy of the weights, if nothing needs it."""
        if self._policy.warm_up and self._builder is not None:
            self._builder = None
            gc.collect()

    def ensure(self, key: ProgramKey) -> None:
        """Make one program available at run time.

        Raises MissingProgramError when the policy forbids compiling it now, or it cannot be.
        """
        if key.name in self.executable.program_names:
            return
        if self._policy.strict or self._policy.require_precompiled or self._compiled is not None:
            self.executable.load(key.name)  # raises MissingProgramError
        logger.warning("Program %s is compiled after ready; requests wait for it", key.name)
        try:
            with self._lock():
                self._compile([key])
        except CaptureError as error:  # ends the request, not the engine
            raise MissingProgramError(str(error)) from error
        self._counters.add_late()

    def count_refused(self, requests: int) -> None:
        """Note requests that ended because a program was missing."""
        self._counters.add_refused(requests)

    def _cache_writable(self) -> bool:
        try:
            self._cache.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "Compile cache: %s cannot be written (%s); programs are compiled at every start. "
                "Set VLLM_CACHE_ROOT to a writable directory",
                self._cache.root,
                error,
            )
            return False
        return True

    def _lock(self) -> AbstractContextManager[None]:
        return nullcontext() if self._key is None else self._cache.locked(self._key)

    def _open_compiled(self, path: Path, wanted: Sequence[ProgramKey]) -> None:
        """A compiled directory: all that will ever run.

        ValueError for one that is damaged or lacks a program.
        """
        found = CompiledDirectory.read(path, self._toolchain)
        found.verify(self._cache.digest)
        found.check_programs([key.name for key in wanted])
        self.kv_layers, self._artifact = found.kv_layers, found.artifact
        self.stored_adapters = found.adapters
        self.adapters = None if found.adapters is None else found.adapters.adapters
        self.executable.add_artifact(found.artifact)

    def _open_entry(self) -> None:
        artifact = None if self._key is None else self._cache.find(self._key)
        if artifact is None:
            return
        try:
            facts = artifact.manifest.model
            self.kv_layers = layers_from_json(facts["kv_layers"])
            if self._adapter_shape is not None:
                modules = modules_from_json(facts["linears"])
                self.adapters = self._adapter_shape.adapters(modules)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("Compile cache: %s says nothing of its layers (%r)", artifact, error)
            return
        self._artifact = artifact
        self.executable.add_artifact(artifact)

    def _fill(self, wanted: Sequence[ProgramKey]) -> None:
        missing = [key for key in wanted if key.name not in self.executable.program_names]
        if not missing:
            return
        if self._policy.require_precompiled:
            names = ", ".join(key.name for key in missing)
            raise ProgramsMissingError(
                f"--rbln-require-precompiled: {len(missing)} programs are not in the compile "
                f"cache at {self._cache.root}: {names}. Start once without the option to compile "
                "them, or set VLLM_RBLN_COMPILE_ONLY=1"
            )
        if self._policy.warm_up or envs.compile_only():
            self._compile(missing)
        elif not self.kv_layers:
            self._take_facts(self._model())

    def _take_facts(self, builder: ModelBuilder) -> None:
        self.kv_layers, self.adapters = builder.kv_layers, builder.adapters

    def _model(self) -> ModelBuilder:
        if self._builder is None:
            logger.info("Building the model to compile from")
            self._builder = builder_of(self._config, self._geometry)
        return self._builder

    def _compile(self, keys: Sequence[ProgramKey]) -> None:
        builder = self._model()
        self._take_facts(builder)
        captured, started = [], time.perf_counter()
        logger.info("Compiling %d programs", len(keys))
        for number, item in enumerate(builder.compile(keys, self._toolchain), start=1):
            captured.append(item)
            now = time.perf_counter()
            logger.info(
                "Compiled %d of %d: %s in %.1f s (%d commands)",
                number,
                len(keys),
                item.graph.name,
                now - started,
                len(item.graph.commands),
            )
            started = now
        self._keep(captured)

    def _keep(self, captured: list[Captured]) -> None:
        """Store what was compiled, and run from the stored copy so that memory is shared."""
        try:
            if self._key is not None:
                self._artifact = self._store(self._key, captured)
                self.executable.add_artifact(self._artifact)
                return
        except (OSError, ToolchainError) as error:
            logger.warning("Compile cache: %s; what was compiled is kept in memory only", error)
        self.executable.add(*captured)

    def _store(self, key: CacheKey, captured: list[Captured]) -> Artifact:
        if self._artifact is None:
            return self._cache.store(key, self._manifest(), captured)
        return self._cache.extend(self._artifact, captured)

    def _manifest(self) -> Manifest:
        return Manifest(
            toolchain=self._toolchain.name,
            toolchain_version=self._toolchain.version,
            profile=self._geometry.profile.name,
            num_devices=1,
            key={},
            model={
                "architecture": self._config.model_config.architecture,
                "kv_layers": layers_to_json(self.kv_layers),
                "linears": modules_to_json(self.adapters),
            },
        )
