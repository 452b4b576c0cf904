# SPDX-License-Identifier: Apache-2.0
"""A compiled model that generates by itself, as Hugging Face's models do.

Decoding, logits processors, sampling and stopping are Transformers' own ``GenerationMixin``; it
calls ``forward``, which runs programs.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from rbln_vllm.devices import resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.model_impl import ARTIFACT_MANIFEST
from rbln_vllm.optimum.adapter_choice import AdapterChoice, AdapterNames, filled_slots
from rbln_vllm.optimum.options import RBLNModelConfig
from rbln_vllm.optimum.recorded import RecordedConfig
from rbln_vllm.optimum.request import Opened, request_of
from rbln_vllm.optimum.rows import RowsCache, RowsRunner
from rbln_vllm.optimum.sources import link_or_copy
from rbln_vllm.toolchain import host_toolchain
from rbln_vllm.worker.threads import allowed_cpus

_NO_RUNTIME = (
    "this model was made with create_runtimes=False: it can be saved, but not run. Load it with "
    "create_runtimes=True"
)


class RBLNModelForCausalLM(GenerationMixin):
    """A compiled decoder-only model.

    ``config`` and ``generation_config`` are Hugging Face's, ``rbln_config`` says what the model
    was compiled for. Up to ``batch_size`` sequences of up to ``max_seq_len`` tokens, prompt and
    output together, are generated at a time; prompts may be padded on the left.
    """

    main_input_name = "input_ids"
    _is_stateful = True
    _supported_generation_modes: ClassVar = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        directory = opened.directory
        self.rbln_config: RecordedConfig = directory.config
        self.config = AutoConfig.from_pretrained(directory.path)
        self.generation_config = _generation_config(directory.path, self.config)
        self._geometry = geometry_of_recorded(directory.config)
        self._adapters = AdapterChoice(directory.adapters)
        self._runner = self._new_runner() if opened.create_runtimes else None

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
        request = request_of(model_id, export, rbln_config, model_save_dir, keywords)
        if request.class_name != cls.__name__:
            raise NameError(
                f"{model_id} is a model for {request.class_name}, not for {cls.__name__}: use that "
                "class, or RBLNAutoModelForCausalLM"
            )
        return cls(request.open())

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.rbln_config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def can_generate(self) -> bool:
        return True

    def is_remote_code(self) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Asked by Transformers, which may change it for decoding: there is nothing to change."""
        return {}

    def set_adapter(self, adapter_name: AdapterNames) -> None:
        """Compute what follows with this compiled-in adapter, or with one for each sequence.

        None, and ``"base"``, is the base model. ValueError for an adapter that is not compiled in.
        A cache of ``generate`` belongs to the adapters that it was filled with.
        """
        self._adapters.choose(adapter_name)

    def set_lora_int_ids(self, lora_int_ids: Tensor | Sequence[int]) -> None:
        """As :meth:`set_adapter`, by an id for each sequence, 0 for the base model; RuntimeError
        for an unknown one."""
        self._adapters.choose_ids(lora_int_ids)

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

    def __call__(self, *arguments: Any, **keywords: Any) -> CausalLMOutputWithPast:
        return self.forward(*arguments, **keywords)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: RowsCache | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """Append ``input_ids`` ``[B, S]`` to the sequences of ``past_key_values``, or begin them.

        ``attention_mask`` ``[B, columns]`` is 0 where a column is padding. Returns logits
        ``[B, 1, vocabulary]`` of each sequence's last token, and the cache for the next call.
        ValueError for more sequences or tokens than the model was compiled for, RuntimeError for
        a model without runtimes.
        """
        if self._runner is None:
            raise RuntimeError(_NO_RUNTIME)
        columns = input_ids.shape[1]
        present_BS = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            present_BS = attention_mask[:, -columns:].bool()
        cache = past_key_values
        if cache is None:
            cache = self._new_cache(len(input_ids), int(present_BS.sum(dim=1).max()))
        adapters_B = self._adapters.slots_B(len(input_ids))
        logits_BV = self._runner.run(cache, input_ids.numpy(), present_BS.numpy(), adapters_B)
        kept = cache if use_cache else None
        return CausalLMOutputWithPast(logits=logits_BV[:, None], past_key_values=kept)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        _generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Transformers' hook for caches of another kind; refuses what will not fit."""
        given = model_kwargs.get("past_key_values")
        if given is not None and not isinstance(given, RowsCache):
            raise TypeError(f"past_key_values of a compiled model are its own, not {type(given)}")
        if given is not None or generation_config.use_cache is False:
            return
        mask = model_kwargs.get("attention_mask")
        padding = 0 if mask is None else mask.shape[1] - int(mask.sum(dim=1).max())
        rows = batch_size * (generation_config.num_return_sequences or 1)
        tokens = max_cache_length - padding
        if tokens + 1 > self._geometry.max_model_len:
            raise ValueError(
                f"prompt and output of {tokens + 1} tokens are longer than the model's max_seq_len "
                f"{self._geometry.max_model_len}: lower max_new_tokens, or compile it for more"
            )
        model_kwargs["past_key_values"] = self._new_cache(rows, tokens)

    def _new_cache(self, rows: int, tokens: int) -> RowsCache:
        if rows > self._geometry.max_num_seqs:
            raise ValueError(
                f"{rows} sequences are more than the model's batch_size "
                f"{self._geometry.max_num_seqs}: give fewer, or compile it with a larger one"
            )
        if tokens > self._geometry.max_model_len:
            raise ValueError(
                f"{tokens} tokens are more than the model's max_seq_len "
                f"{self._geometry.max_model_len}: give fewer, or compile it for more"
            )
        return RowsCache(self._opened.directory.kv_layers, self._geometry, rows, tokens)

    def _new_runner(self) -> RowsRunner:
        executable = host_toolchain(allowed_cpus()).new_executable()
        directory = self._opened.directory
        executable.add_artifact(directory.artifact)
        if directory.adapters is not None:
            executable.bind(filled_slots(directory.adapters).inputs)
        return RowsRunner(executable, self._geometry)


def geometry_of_recorded(config: RecordedConfig) -> Geometry:
    """The geometry that a model was compiled for."""
    return Geometry(
        profile=resolve_profile(None if config.npu == "HOST" else config.npu),
        chunk=min(config.prefill_chunk_size, config.max_seq_len),
        block_size=config.kvcache_block_size,
        max_model_len=config.max_seq_len,
        max_num_seqs=config.batch_size,
        decode_buckets=tuple(sorted(config.decoder_batch_sizes)),
    )


def _generation_config(directory: Path, config: Any) -> GenerationConfig:
    """The model's own defaults for ``generate``, found as Transformers finds them."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory)
    return GenerationConfig.from_model_config(config)
