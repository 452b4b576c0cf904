# SPDX-License-Identifier: Apache-2.0
"""A directory that ``rbln-vllm compile`` or ``save_pretrained`` wrote, opened to be served.

Beside the artifact it holds what a server reads of a model: its configuration and tokenizer. The
original weights and Hugging Face's modules are not needed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from logging import Logger
from pathlib import Path

import torch

from rbln_vllm import __version__
from rbln_vllm.lora.shape import modules_to_json
from rbln_vllm.lora.stored import LINEARS, StoredAdapters
from rbln_vllm.models.kv_layers import KVLayer, layers_from_json, layers_to_json
from rbln_vllm.optimum.recorded import RECORD, RecordedConfig
from rbln_vllm.startup.model_impl import ARTIFACT_MANIFEST
from rbln_vllm.toolchain import (
    Adapters,
    Artifact,
    ArtifactError,
    FileEntry,
    Manifest,
    Toolchain,
    compiled_with,
)

ANY_COMMAND = "rbln-vllm compile MODEL --output"


@dataclass(frozen=True)
class CompiledDirectory:
    """An artifact and what was recorded in it. :meth:`read` checks that it can be used here."""

    artifact: Artifact
    config: RecordedConfig
    kv_layers: tuple[KVLayer, ...]
    adapters: StoredAdapters | None = None
    """Those that are compiled in."""

    @classmethod
    def read(cls, directory: Path, toolchain: Toolchain) -> "CompiledDirectory":
        """Read the manifest; contents are not verified.

        ValueError, with the command that makes the directory anew, for one that another version or
        another tool wrote.
        """
        try:
            artifact = Artifact.read(directory)
        except ArtifactError as error:
            raise ValueError(
                f"{directory} holds no model that this version compiled ({error}): compile it "
                f"anew with {ANY_COMMAND} {directory}"
            ) from error
        try:
            record = artifact.manifest.model[RECORD]
            layers = layers_from_json(artifact.manifest.model["kv_layers"])
            config = RecordedConfig.from_json(record)
            found = cls(artifact, config, layers, _adapters_of(artifact, config))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{directory / ARTIFACT_MANIFEST} does not say what the model was compiled for "
                f"({error!r:.200}): compile it anew with {ANY_COMMAND} {directory}"
            ) from error
        found._check_version(toolchain)
        return found

    @property
    def path(self) -> Path:
        return self.artifact.directory

    @property
    def compile_command(self) -> str:
        return self.config.compile_command(self.path)

    def verify(self, digest_of: Callable[[Path], str] | None = None) -> None:
        """ValueError, with the same command, when a file is missing, truncated or altered."""
        try:
            Artifact.open(self.path, digest_of)
        except ArtifactError as error:
            raise ValueError(f"{error}: compile it anew with {self.compile_command}") from error

    def check_programs(self, wanted: Collection[str]) -> None:
        """ValueError when a program that will run is not here."""
        missing = [name for name in wanted if name not in self.artifact.manifest.programs]
        if missing:
            raise ValueError(
                f"{self.path} lacks {len(missing)} programs that this configuration runs: "
                f"{', '.join(missing)}. Leave out the arguments that change sizes, or compile it "
                f"anew with {self.compile_command}"
            )

    def check_device(self, name: str) -> None:
        """ValueError when the model was compiled for another device."""
        if self.config.npu != name:
            force = "unset RBLN_FORCE_NPU_NAME"
            if self.config.npu != "HOST":
                force = f"set RBLN_FORCE_NPU_NAME={self.config.npu}"
            raise ValueError(
                f"{self.path} was compiled for {self.config.npu}, not for {name}: {force}, or "
                f"compile it anew with {self.compile_command}"
            )

    def warn_of_other_code(self, logger: Logger) -> None:
        """Say so when the compiler is of the same version but not the same code."""
        ours, theirs = compiled_with()["compiler_code"], self.artifact.manifest.key
        if theirs.get("compiler_code") != ours:
            logger.warning(
                "%s was compiled by other code of the same version; if it fails or its output is "
                "wrong, compile it anew with %s",
                self.path,
                self.compile_command,
            )

    def _check_version(self, toolchain: Toolchain) -> None:
        manifest = self.artifact.manifest
        theirs = f"{manifest.toolchain} {manifest.toolchain_version}"
        pairs = {
            theirs: f"{toolchain.name} {toolchain.version}",
            f"rbln-vllm {manifest.key.get('rbln_vllm')}": f"rbln-vllm {__version__}",
        }
        for made_by, here in pairs.items():
            if made_by != here:
                raise ValueError(
                    f"{self.path} was compiled by {made_by}, and this is {here}: compile it anew "
                    f"with {self.compile_command}"
                )


def _adapters_of(artifact: Artifact, config: RecordedConfig) -> StoredAdapters | None:
    if config.lora_config is None:
        return None
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{config.dtype} is no dtype")
    return StoredAdapters.of(artifact, config.lora_config, dtype)


def new_manifest(
    toolchain: Toolchain,
    config: RecordedConfig,
    architecture: str,
    layers: tuple[KVLayer, ...],
    *,
    adapters: Adapters | None = None,
    attachments: Mapping[str, FileEntry] | None = None,
) -> Manifest:
    """The manifest of a model that is about to be compiled; ``attachments`` are its adapters."""
    versions = {name: str(version) for name, version in compiled_with().items()}
    return Manifest(
        toolchain=toolchain.name,
        toolchain_version=toolchain.version,
        profile=config.npu,
        num_devices=config.num_devices,
        key={"rbln_vllm": __version__, **versions},
        model={
            "architecture": architecture,
            "kv_layers": layers_to_json(layers),
            LINEARS: modules_to_json(adapters),
            RECORD: config.to_json(),
        },
        attachments=dict(attachments or {}),
        label=Path(config.source).name,
    )
