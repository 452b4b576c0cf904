# SPDX-License-Identifier: Apache-2.0
"""A compiled model that generates by itself, as Hugging Face's models do.

Decoding, logits processors, sampling and stopping are Transformers' own ``GenerationMixin``; it
calls ``forward``, which runs programs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from rbln_vllm.optimum.adapter_choice import AdapterChoice, AdapterNames, filled_slots
from rbln_vllm.optimum.base import NO_RUNTIME, RBLNModel
from rbln_vllm.optimum.request import Opened
from rbln_vllm.optimum.rows import RowsCache, RowsRunner
from rbln_vllm.toolchain import Executable


class RBLNModelForCausalLM(RBLNModel, GenerationMixin):
    """A compiled decoder-only model.

    ``config`` and ``generation_config`` are Hugging Face's, ``rbln_config`` says what the model
    was compiled for. Up to ``batch_size`` sequences of up to ``max_seq_len`` tokens, prompt and
    output together, are generated at a time; prompts may be padded on the left.
    """

    _is_stateful = True
    _supported_generation_modes: ClassVar = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self.generation_config = _generation_config(opened.directory.path, self.config)
        self._adapters = AdapterChoice(opened.directory.adapters)
        self._runner = None
        if opened.create_runtimes:
            self._runner = RowsRunner(self._new_executable(), self._geometry)

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

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: RowsCache | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
        inputs_embeds: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Append ``input_ids`` ``[B, S]`` to the sequences of ``past_key_values``, or begin them.

        ``inputs_embeds`` ``[B, S, E]`` take their place where the model was compiled for such.

        ``attention_mask`` ``[B, columns]`` is 0 where a column is padding. Returns logits
        ``[B, 1, vocabulary]`` of each sequence's last token, and the cache for the next call.
        ValueError for more sequences or tokens than the model was compiled for, RuntimeError for
        a model without runtimes.
        """
        if self._runner is None:
            raise RuntimeError(NO_RUNTIME)
        given = self._only_input(input_ids, inputs_embeds)
        rows, columns = given.shape[:2]
        present_BS = torch.ones(rows, columns, dtype=torch.bool)
        if attention_mask is not None:
            present_BS = attention_mask[:, -columns:].bool()
        cache = past_key_values
        if cache is None:
            cache = self._new_cache(rows, int(present_BS.sum(dim=1).max()))
        if input_ids is not None:
            adapters_B = self._adapters.slots_B(rows)
            logits_BV = self._runner.run(cache, input_ids.numpy(), present_BS.numpy(), adapters_B)
        else:
            logits_BV = self._runner.run_embeds(cache, given, present_BS.numpy())
        kept = cache if use_cache else None
        return CausalLMOutputWithPast(logits=logits_BV[:, None], past_key_values=kept)

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """What makes embeddings ``[..., E]`` of token ids ``[...]``. ValueError for a model that
        takes none, RuntimeError for one without runtimes."""
        if self._runner is None:
            raise RuntimeError(NO_RUNTIME)
        self._check_takes_embeds()
        runner = self._runner

        def look_up(ids: Tensor) -> Tensor:
            return runner.look_up(ids.flatten().numpy()).view(*ids.shape, -1)

        return look_up

    def _only_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            return input_ids
        self._check_takes_embeds()
        return inputs_embeds

    def _check_takes_embeds(self) -> None:
        if not self._geometry.takes_embeds:
            raise ValueError(
                "this model was compiled for token ids: compile it with use_inputs_embeds to give "
                "it embeddings"
            )

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

    def _new_executable(self) -> Executable:
        executable, adapters = super()._new_executable(), self._opened.directory.adapters
        if adapters is not None:
            executable.bind(filled_slots(adapters).inputs)
        return executable


def _generation_config(directory: Path, config: Any) -> GenerationConfig:
    """The model's own defaults for ``generate``, found as Transformers finds them."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory)
    return GenerationConfig.from_model_config(config)
