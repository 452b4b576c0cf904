# SPDX-License-Identifier: Apache-2.0
"""The ``transformers`` implementation: Hugging Face's module, captured program by program."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rbln_vllm.geometry import Geometry
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.program_inputs import EMBEDS_INPUT, forward_inputs, free_axes
from rbln_vllm.models.sampler import capture_sampler, is_sampler
from rbln_vllm.models.transformers.attention import PagedStep
from rbln_vllm.models.transformers.layers import attention_layers
from rbln_vllm.models.transformers.linears import linears
from rbln_vllm.models.transformers.rotary import tabulate_rotary
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Captured, ModuleCompiler, Toolchain


class TransformersModelBuilder:
    """Builds the model (with its weights) and compiles its programs.

    What layers there are is known without weights; those are loaded when a program is compiled.
    ValueError for windows that the device cannot have.
    """

    def __init__(
        self, source: ModelSource, geometry: Geometry, adapters: AdapterShape | None = None
    ) -> None:
        self._source, self._geometry = source, geometry
        model = source.shape()
        self.kv_layers: tuple[KVLayer, ...] = attention_layers(model)
        for layer in self.kv_layers:
            if layer.window:
                geometry.profile.check_window(layer.window, geometry.chunk)
        self.adapters = None if adapters is None else adapters.adapters(linears(model))

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        compiler = toolchain.compiler(self.module)
        for key in keys:
            yield self._compile(key, compiler)

    def capturing(self) -> AbstractContextManager[None]:
        """Around whatever calls ``forward`` or ``logits``."""
        return nullcontext()

    def named_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name they have. Loads the model."""
        return named_weights(self.module)

    @cached_property
    def module(self) -> PreTrainedModel:
        """The model with its weights."""
        return self._load()

    def _load(self) -> PreTrainedModel:
        model = self._source.load()
        tabulate_rotary(model, self._geometry.max_model_len, self._source.dtype)
        return model

    def _compile(self, key: ProgramKey, compiler: ModuleCompiler) -> Captured:
        if key.role is Role.LOGITS:
            return compiler.capture(self.logits, self._logits_inputs(key), key.name)
        if is_sampler(key):
            return capture_sampler(key, compiler, self._head_VH.shape[0], self._source.dtype)
        if key.role is Role.EMBED:
            ids_N = torch.zeros(key.batch, dtype=torch.int32)
            return compiler.capture(self.embed, {"input_ids": ids_N}, key.name)
        inputs = self._forward_inputs(key)
        axes = free_axes(self.kv_layers)
        return compiler.capture(self.forward, inputs, key.name, axes, self.adapters)

    def _forward_inputs(self, key: ProgramKey) -> dict[str, Tensor]:
        inputs = forward_inputs(key, self._geometry, self.kv_layers)
        if not self._geometry.takes_embeds:
            return inputs
        del inputs["input_ids"]
        width = cast(Any, self.module.get_input_embeddings()).weight.shape[1]
        embeds_NE = torch.zeros(key.num_tokens, width, dtype=self._source.dtype)
        return {EMBEDS_INPUT: embeds_NE, **inputs}

    def forward(
        self,
        *,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        query_pos: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kv_caches: Tensor,
    ) -> Tensor:
        """Token ids ``[N]``, or embeddings ``[N, E]``, to hidden states ``[N, hidden]``."""
        step = PagedStep(tuple(kv_caches.values()), block_table, slots, query_pos)
        output = self.module.base_model(
            input_ids=None if input_ids is None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            use_cache=False,
            paged=step,
        )
        hidden_NH: Tensor = output.last_hidden_state[0]
        return hidden_NH

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[N]`` to embeddings ``[N, E]``, as the model would look them up itself."""
        embeds_NE: Tensor = cast(Any, self.module.get_input_embeddings())(input_ids)
        return embeds_NE

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of any rows to their logits, and to the token each row likes best."""
        with _base_model_replaced(self.module, _GivenHidden(hidden[None])):
            logits_BV: Tensor = self.module(input_ids=None, use_cache=False).logits[0]
        return logits_BV, logits_BV.argmax(dim=-1)

    def _logits_inputs(self, key: ProgramKey) -> dict[str, Tensor]:
        return {"hidden": torch.zeros(key.batch, self._head_VH.shape[1], dtype=self._source.dtype)}

    @property
    def _head_VH(self) -> Tensor:  # noqa: N802
        weight_VH: Tensor = cast(Any, self.module.get_output_embeddings()).weight
        return weight_VH


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name they have."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.detach() for name, tensor in named}


class _GivenHidden(torch.nn.Module):
    """Stands for the layers of a model, whose hidden states are there already."""

    def __init__(self, hidden_1NH: Tensor) -> None:
        super().__init__()
        self._hidden_1NH = hidden_1NH

    @property
    def decoder(self) -> "_GivenHidden":
        """OPT's head calls the decoder inside its base model."""
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> "_LayersOutput":
        return _LayersOutput(self._hidden_1NH)


class _LayersOutput:
    """Hidden states, and None for all else that a model's head may ask of its layers."""

    def __init__(self, hidden_1NH: Tensor) -> None:
        self.last_hidden_state = hidden_1NH

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


@contextmanager
def _base_model_replaced(model: PreTrainedModel, other: torch.nn.Module) -> Iterator[None]:
    """What a model does after its layers (head, caps, scales) is then all that it does."""
    name = model.base_model_prefix
    layers = getattr(model, name)
    setattr(model, name, other)
    try:
        yield
    finally:
        setattr(model, name, layers)
