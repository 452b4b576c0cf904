# SPDX-License-Identifier: Apache-2.0
"""What ``from_pretrained`` was asked for: a directory to load or a model to compile."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_vllm.models.architectures import Architecture
from rbln_vllm.optimum.choice import ANYTHING, Wanted
from rbln_vllm.optimum.compiling import CompileJob
from rbln_vllm.optimum.directory import CompiledDirectory
from rbln_vllm.optimum.options import RUNTIME, RBLNModelConfig, given_options, split_keywords
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.startup.model_impl import is_compiled_directory
from rbln_vllm.toolchain import host_toolchain


@dataclass(frozen=True)
class Opened:
    """A compiled model on disk; ``owner`` removes a temporary directory when it is dropped."""

    directory: CompiledDirectory
    create_runtimes: bool
    owner: tempfile.TemporaryDirectory[str] | None = None


@dataclass(frozen=True)
class LoadRequest:
    """A directory that was compiled before."""

    directory: CompiledDirectory
    create_runtimes: bool

    @property
    def architecture(self) -> Architecture:
        return self.directory.config.architecture

    def open(self) -> Opened:
        """ValueError when a file is missing or altered."""
        self.directory.verify()
        return Opened(self.directory, self.create_runtimes)


@dataclass(frozen=True)
class CompileRequest:
    """A model to compile, into ``target`` or else a temporary directory."""

    job: CompileJob
    create_runtimes: bool
    target: Path | None = None

    @property
    def architecture(self) -> Architecture:
        return self.job.plan.architecture

    def open(self) -> Opened:
        """Compile it. CaptureError when it cannot be, OSError of the disk."""
        if self.target is not None:
            return Opened(self.job.compile_into(self.target), self.create_runtimes)
        owner = tempfile.TemporaryDirectory(prefix="rbln-")
        directory = self.job.compile_into(Path(owner.name) / "model")
        return Opened(directory, self.create_runtimes, owner)


def request_of(
    model_id: str | Path,
    export: bool | None,
    rbln_config: RBLNModelConfig | Mapping[str, Any] | None,
    model_save_dir: str | Path | None,
    keywords: Mapping[str, Any],
    *,
    wanted: Wanted = ANYTHING,
) -> LoadRequest | CompileRequest:
    """Sort out the arguments of ``from_pretrained``.

    ``export`` None compiles unless ``model_id`` is a compiled directory. ValueError, in words, for
    options that cannot be; FileNotFoundError for ``export=False`` without such a directory.
    """
    ours, theirs = split_keywords(keywords)
    options = RBLNModelConfig.merged(rbln_config, ours)
    compiled = is_compiled_directory(str(model_id))
    if export is False and not compiled:
        raise FileNotFoundError(
            f"{model_id} is not a compiled directory: leave out export=False to compile it"
        )
    if compiled and not export:
        directory = CompiledDirectory.read(Path(model_id), host_toolchain())
        check_same(directory.config, options, theirs)
        return LoadRequest(directory, options.create_runtimes)
    job = CompileJob.of(str(model_id), options, wanted, **theirs)
    target = None if model_save_dir is None else Path(model_save_dir)
    return CompileRequest(job, options.create_runtimes, target)


def check_same(
    recorded: RecordedConfig, options: RBLNModelConfig, keywords: Mapping[str, Any]
) -> None:
    """ValueError for an option that the model was not compiled for, TypeError for a keyword that a
    compiled model has no use for."""
    unused = sorted(keywords.keys() - {"dtype", "torch_dtype", "trust_remote_code"})
    if unused:
        raise TypeError(f"a compiled model takes no {', '.join(unused)}")
    given = {n: v for n, v in given_options(options).items() if n not in RUNTIME}
    dtypes = (keywords.get(name) for name in ("dtype", "torch_dtype"))
    dtype = next((d for d in dtypes if d not in (None, "auto")), None)
    if dtype is not None:
        given["dtype"] = str(dtype).removeprefix("torch.")
    if (sizes := given.get("decoder_batch_sizes")) is not None:
        given["decoder_batch_sizes"] = tuple(sorted({*sizes, recorded.batch_size}, reverse=True))
    adapters, theirs = given.pop("lora_config", None), recorded.lora_config
    if adapters is not None and (theirs is None or not adapters.is_of(theirs)):
        names = "none" if theirs is None else f"{', '.join(theirs.names)} by their order"
        raise ValueError(
            f"lora_config is not that of the compiled model, whose adapters are {names}: leave it "
            "out, or compile the original anew"
        )
    for name, value in given.items():
        ours = getattr(recorded, name)
        if value is not None and value != ours:
            raise ValueError(
                f"{name} is {ours!r} in the compiled model, not {value!r}: leave it out, or "
                "compile the original anew"
            )
