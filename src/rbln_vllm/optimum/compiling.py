# SPDX-License-Identifier: Apache-2.0
"""Compile a Hugging Face model into a directory that can be served."""

import copy
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rbln_vllm.lora.config import RBLNLoRAConfig
from rbln_vllm.lora.peft_files import PeftAdapter, read_adapters
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.lora.slots import LowRank
from rbln_vllm.lora.stored import compiled_shape, write_adapters
from rbln_vllm.models.architectures import Architecture
from rbln_vllm.models.transformers.source import ModelSource, auto_class_of
from rbln_vllm.optimum import sentence
from rbln_vllm.optimum.builders import builder_for
from rbln_vllm.optimum.choice import ANYTHING, Wanted, choose_architecture
from rbln_vllm.optimum.directory import CompiledDirectory, new_manifest
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.parallel import compile_programs
from rbln_vllm.optimum.plan import CompilePlan, plan_compile
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.optimum.sources import HUB_KEYWORDS, copy_served_files, local_directory
from rbln_vllm.pooling.reranker import check_overrides
from rbln_vllm.startup.model_impl import ARTIFACT_MANIFEST, is_compiled_directory
from rbln_vllm.toolchain import Adapters, Toolchain, host_toolchain

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Progress = Callable[[str], None]
"""Called with the name of each program when it has been compiled."""


@dataclass(frozen=True)
class CompileJob:
    """A model, by its own name, and what it is compiled for.

    ``adapters`` are compiled in; ``lora_config`` says all of them that a file must.
    """

    name: str
    source: ModelSource
    plan: CompilePlan
    adapters: tuple[PeftAdapter, ...] = ()
    lora_config: RBLNLoRAConfig | None = None

    @classmethod
    def of(
        cls,
        model_id: str,
        options: RBLNModelConfig,
        wanted: Wanted = ANYTHING,
        **keywords: Any,
    ) -> "CompileJob":
        """Look the model up. ``keywords`` are Hugging Face's: how to fetch it (``revision``,
        ``token``, ...), ``dtype``, ``trust_remote_code``, ``config``, and fields of the
        configuration to change; and vLLM's ``hf_overrides``, which may also add fields.

        ValueError for what cannot be compiled, TypeError for a keyword that nobody knows, OSError
        of the hub's client.
        """
        if is_compiled_directory(model_id):
            raise ValueError(
                f"{model_id} is a compiled model, which has no weights to compile anew: give the "
                "model that it was compiled from"
            )
        hub = {name: keywords.pop(name) for name in HUB_KEYWORDS if name in keywords}
        directory = local_directory(model_id, hub)
        trust = bool(keywords.pop("trust_remote_code", False))
        dtype = _asked_dtype(keywords)
        config = _config_of(directory, trust, keywords)
        row = choose_architecture(config, wanted, embeds=sentence.pools(directory))
        config.architectures = [row.name]  # what a server takes it for
        longest = sentence.longest_text(directory, config) if row.only_pools else None
        source = ModelSource(
            config,
            str(directory),
            dtype or _own_dtype(config, row),
            trust_remote_code=trust,
            auto=auto_class_of(row, config),
        )
        plan = plan_compile(config, options, row, longest)
        if options.lora_config is None:
            return cls(model_id, source, plan)
        fetch = {name: value for name, value in hub.items() if name != "revision"}
        read = read_adapters(options.lora_config, lambda path: local_directory(path, fetch))
        return cls(model_id, source, plan, *read)

    @property
    def recorded(self) -> RecordedConfig:
        dtype = str(self.source.dtype).removeprefix("torch.")
        return RecordedConfig.of(self.plan, self.name, dtype, self.lora_config)

    @property
    def adapter_shape(self) -> AdapterShape | None:
        """None without adapters."""
        if self.lora_config is None:
            return None
        return compiled_shape(self.lora_config, self.source.dtype)

    def adapter_parts(self, adapters: Adapters | None) -> dict[int, dict[str, LowRank]]:
        """By id and module; AdapterError for one that does not fit the model's linears."""
        if adapters is None:
            return {}
        return {item.config.lora_int_id: item.parts(adapters) for item in self.adapters}

    def compile_into(
        self, directory: Path, *, workers: int = 1, progress: Progress = lambda _: None
    ) -> CompiledDirectory:
        """Compile every program and write ``directory``, whole or not at all.

        What was compiled there before is replaced. CaptureError when the model cannot be
        compiled, FileExistsError for a directory of something else, OSError of the disk.
        """
        check_target(directory, Path(self.source.name))
        toolchain = host_toolchain()
        with _whole(directory) as scratch:
            self._write(scratch, toolchain, workers, progress)
        return CompiledDirectory.read(directory, toolchain)

    def _write(
        self, directory: Path, toolchain: Toolchain, workers: int, progress: Progress
    ) -> None:
        builder = builder_for(self.source, self.plan, self.adapter_shape)
        attachments = write_adapters(directory, self.adapter_parts(builder.adapters))
        keys = self.plan.geometry.table.programs
        captured = []
        for item in compile_programs(builder, keys, toolchain, workers):
            captured.append(item)
            progress(item.graph.name)
        order = {key.name: place for place, key in enumerate(keys)}
        captured.sort(key=lambda item: order[item.graph.name])
        manifest = new_manifest(
            toolchain,
            self.recorded,
            self.plan.architecture.name,
            builder.kv_layers,
            adapters=builder.adapters,
            attachments=attachments,
        )
        toolchain.write(directory, manifest, captured)
        config = copy.deepcopy(self.source.config)
        config.dtype = self.source.dtype
        config.save_pretrained(directory)
        copy_served_files(Path(self.source.name), directory)
        if self.plan.architecture.only_pools:
            sentence.copy_modules(Path(self.source.name), directory)


def check_target(directory: Path, source: Path) -> None:
    """FileExistsError for a directory that holds anything but a compiled model."""
    if directory.resolve() == source.resolve():
        raise FileExistsError(f"{directory} is the model itself: give another directory")
    if not directory.exists() or is_compiled_directory(str(directory)):
        return
    if not directory.is_dir() or next(directory.iterdir(), None) is not None:
        raise FileExistsError(
            f"{directory} exists and holds no compiled model ({ARTIFACT_MANIFEST}): give an empty "
            "or a new directory"
        )


def _config_of(directory: Path, trust_remote_code: bool, keywords: dict[str, Any]) -> Any:
    overrides = keywords.pop("hf_overrides", None) or {}
    if not isinstance(overrides, Mapping):
        raise TypeError(f"hf_overrides must be a mapping of fields, not {type(overrides).__name__}")
    check_overrides(overrides)
    config = _own_config(directory, trust_remote_code, keywords)
    config.update(overrides)
    return config


def _own_config(directory: Path, trust_remote_code: bool, keywords: dict[str, Any]) -> Any:
    given = keywords.pop("config", None)
    if given is not None:
        if keywords:
            raise TypeError(f"from_pretrained has no arguments {', '.join(keywords)}")
        return copy.deepcopy(given)
    config, unused = AutoConfig.from_pretrained(
        directory, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **keywords
    )
    if unused:
        raise TypeError(
            f"from_pretrained has no arguments {', '.join(unused)}: options of the compiled model "
            "begin with rbln_, others are fields of the model's configuration"
        )
    return config


def _asked_dtype(keywords: dict[str, Any]) -> torch.dtype | None:
    """``dtype`` (or its older name) as a type; None for the checkpoint's own."""
    given = [keywords.pop(name) for name in ("dtype", "torch_dtype") if name in keywords]
    dtype = given[0] if given else None
    if dtype in (None, "auto"):
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!r} is not auto, {', '.join(DTYPES)}")
    return found


def _own_dtype(config: Any, row: Architecture) -> torch.dtype:
    """The checkpoint's type, float32 where its configuration names none and for encoders."""
    if row.encoder:
        return torch.float32
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return DTYPES.get(name, torch.float32)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A directory beside ``directory`` that takes its place at the end, or leaves no trace."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = _aside(directory)
    scratch.mkdir()
    try:
        yield scratch
        _put_in_place(scratch, directory.resolve())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _put_in_place(scratch: Path, directory: Path) -> None:
    if not directory.exists():
        scratch.rename(directory)
        return
    old = _aside(directory)
    directory.rename(old)
    try:
        scratch.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _aside(directory: Path) -> Path:
    resolved = directory.resolve()
    return resolved.with_name(f".{resolved.name}.{secrets.token_hex(8)}")
