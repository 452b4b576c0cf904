# SPDX-License-Identifier: Apache-2.0
"""What every compiled model of the ahead-of-time API has: how it is made and saved."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoConfig, PreTrainedModel

from rbln_vllm.optimum.choice import Wanted
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.optimum.request import Opened, request_of
from rbln_vllm.optimum.sources import link_or_copy
from rbln_vllm.startup.model_impl import ARTIFACT_MANIFEST
from rbln_vllm.toolchain import Executable, host_toolchain
from rbln_vllm.worker.threads import allowed_cpus

NO_RUNTIME = (
    "this model was made with create_runtimes=False: it can be saved, but not run. Load it with "
    "create_runtimes=True"
)


class RBLNModel:
    """A compiled model.

    ``config`` is Hugging Face's, ``rbln_config`` says what the model was compiled for.
    """

    main_input_name = "input_ids"

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        directory = opened.directory
        self.rbln_config: RecordedConfig = directory.config
        self.config = AutoConfig.from_pretrained(directory.path)
        self._geometry = directory.config.geometry

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        export: bool | None = None,
        rbln_config: RBLNModelConfig | Mapping[str, Any] | None = None,
        *,
        model_save_dir: str | Path | None = None,
        **keywords: Any,
    ) -> Self:
        """Load a compiled directory, or compile a model.

        Args:
            model_id: a directory, or a name on Hugging Face's hub.
            export: True compiles, False loads, None compiles what is not compiled yet.
            rbln_config: options of the compiled model, of which ``rbln_<option>`` keywords win.
            model_save_dir: where to compile to; a temporary directory when not given.
            keywords: ``rbln_<option>``; ``dtype``, ``revision``, ``trust_remote_code`` and others
                of Hugging Face's, and fields of the model's configuration.

        Raises:
            ValueError: options, sizes or a model that cannot be, in words.
            NameError: a compiled directory of another class.
            FileNotFoundError: ``export=False`` and no compiled directory.
        """
        wanted = Wanted(cls.__name__.removeprefix("RBLN"))
        request = request_of(model_id, export, rbln_config, model_save_dir, keywords, wanted=wanted)
        found = request.architecture.class_name
        if found != cls.__name__:
            raise NameError(
                f"{model_id} is a model for {found}, not for {cls.__name__}: use that "
                "class, or one of RBLNAutoModel, RBLNAutoModelForCausalLM, "
                "RBLNAutoModelForSequenceClassification"
            )
        return cls(request.open())

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        rbln_config: RBLNModelConfig | Mapping[str, Any] | None = None,
        *,
        model_save_dir: str | Path | None = None,
        **keywords: Any,
    ) -> Self:
        """Compile a Hugging Face model that is in memory; as :meth:`from_pretrained` otherwise.

        It has no tokenizer: save that beside the compiled model to serve it.
        """
        with tempfile.TemporaryDirectory(prefix="rbln-") as directory:
            model.save_pretrained(directory)
            return cls.from_pretrained(
                directory, True, rbln_config, model_save_dir=model_save_dir, **keywords
            )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.rbln_config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def save_pretrained(
        self, save_directory: str | Path, push_to_hub: bool = False, **_: Any
    ) -> None:
        """Copy the compiled model to a directory, beside or over what is there.

        FileExistsError for its own directory and for a file, FileNotFoundError when its own is
        gone, ValueError for ``push_to_hub``.
        """
        source, target = self._opened.directory.path, Path(save_directory)
        if push_to_hub:
            raise ValueError(
                "push_to_hub is not supported: save the model and upload the directory with "
                "`hf upload`"
            )
        if not (source / ARTIFACT_MANIFEST).is_file():
            raise FileNotFoundError(f"the compiled model in {source} is gone")
        if target.exists() and (not target.is_dir() or target.samefile(source)):
            raise FileExistsError(f"{target} is a file or the model's own directory")
        # The manifest comes last: without it the directory counts as not compiled.
        (target / ARTIFACT_MANIFEST).unlink(missing_ok=True)
        copy = link_or_copy if self._opened.owner is not None else shutil.copyfile
        ignore = shutil.ignore_patterns(ARTIFACT_MANIFEST)
        shutil.copytree(source, target, copy_function=copy, ignore=ignore, dirs_exist_ok=True)
        shutil.copyfile(source / ARTIFACT_MANIFEST, target / ARTIFACT_MANIFEST)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Of each kind of model."""
        raise NotImplementedError

    def _new_executable(self) -> Executable:
        executable = host_toolchain(allowed_cpus()).new_executable()
        executable.add_artifact(self._opened.directory.artifact)
        return executable
