# SPDX-License-Identifier: Apache-2.0
"""Pooling models: encoders, and decoders of which only hidden states are wanted.

What is pooled, and how, is vLLM's affair; a program gives the hidden states of all tokens, and
another the classifier's logits of what was pooled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.transformers.attention import WholeStep
from rbln_vllm.models.transformers.builder import TransformersModelBuilder, named_weights
from rbln_vllm.models.transformers.heads import HEAD, attach_answers, attach_classifier
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.pooling.config import classifies
from rbln_vllm.pooling.reranker import answer_ids, is_original_reranker
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Adapters, Captured, ModuleCompiler, Toolchain

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Head:
    """A classifier: its dtype, and the ids of no and yes where it is made of answers."""

    dtype: torch.dtype
    answers: tuple[int, int] | None = None

    @classmethod
    def of(cls, model: "ModelConfig") -> "Head | None":
        """None for a model that does not classify. ValueError for answers that are no tokens."""
        if not classifies(model):
            return None
        answers = answer_ids(model) if is_original_reranker(model.hf_config) else None
        return cls(model.head_dtype, answers)

    def attach(self, model: PreTrainedModel) -> None:
        if self.answers is None:
            attach_classifier(model, self.dtype)
        else:
            attach_answers(model, *self.answers, self.dtype)

    def compile(
        self, key: ProgramKey, model: PreTrainedModel, compiler: ModuleCompiler
    ) -> Captured:
        """The program of a classifier that was attached."""
        width = int(model.config.get_text_config().hidden_size)
        inputs = {"hidden": torch.zeros(key.batch, width, dtype=self.dtype)}
        return compiler.capture(getattr(model, HEAD), inputs, key.name)


class PoolingDecoderBuilder(TransformersModelBuilder):
    """A decoder's prefill and decode programs, and its classifier's."""

    def __init__(self, source: ModelSource, geometry: Geometry, head: Head | None) -> None:
        super().__init__(source, geometry)
        self._head = head

    def _load(self) -> PreTrainedModel:
        model = super()._load()
        if self._head is not None:
            self._head.attach(model)
        return model

    def _compile(self, key: ProgramKey, compiler: ModuleCompiler) -> Captured:
        if key.role is not Role.HEAD:
            return super()._compile(key, compiler)
        assert self._head is not None
        return self._head.compile(key, self.module, compiler)


class EncoderBuilder:
    """An encoder's programs, which keep no keys and values."""

    kv_layers: tuple[KVLayer, ...] = ()
    adapters: Adapters | None = None

    def __init__(self, source: ModelSource, head: Head | None) -> None:
        self._source, self._head = source, head

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        compiler = toolchain.compiler(self._model)
        for key in keys:
            yield self._compile(key, compiler)

    def named_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name they have. Loads the model."""
        return named_weights(self._model)

    @cached_property
    def _model(self) -> PreTrainedModel:
        model = self._source.load()
        if self._head is not None:
            self._head.attach(model)
        base = cast(Any, model.base_model)
        base.pooler = None
        shift_positions(base.embeddings)
        return model

    def _compile(self, key: ProgramKey, compiler: ModuleCompiler) -> Captured:
        if key.role is Role.HEAD:
            assert self._head is not None
            return self._head.compile(key, self._model, compiler)
        return compiler.capture(self._forward, encoder_inputs(key), key.name)

    def _forward(
        self, input_ids: Tensor, positions: Tensor, token_types: Tensor, row_starts: Tensor
    ) -> Tensor:
        """Token ids ``[N]`` to hidden states ``[N, hidden]``."""
        output = self._model.base_model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            token_type_ids=token_types[None],
            paged=WholeStep(row_starts),
        )
        hidden_NH: Tensor = output.last_hidden_state[0]
        return hidden_NH


def encoder_inputs(key: ProgramKey) -> dict[str, Tensor]:
    """Tensors of the shapes and dtypes that an encoder program takes, by name; all zero."""
    tokens = key.num_tokens
    return {
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "token_types": torch.zeros(tokens, dtype=torch.int32),
        "row_starts": torch.zeros(key.batch + 1, dtype=torch.int32),
    }


def first_position(embeddings: torch.nn.Module) -> int:
    """The row of the position table that a sequence begins with.

    RoBERTa's table has rows for padding first: a sequence begins after the padding id's.
    """
    padding = getattr(embeddings.position_embeddings, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def shift_positions(embeddings: torch.nn.Module) -> None:
    """Drop what is before the first position, so that positions count from 0."""
    first = first_position(embeddings)
    if not first:
        return
    table_PH = cast(Any, embeddings.position_embeddings).weight.detach()[first:].clone()
    shifted = torch.nn.Embedding.from_pretrained(table_PH)
    cast(Any, embeddings).position_embeddings = shifted


def pooling_builder(
    vllm_config: "VllmConfig", geometry: Geometry
) -> PoolingDecoderBuilder | EncoderBuilder:
    """The builder of a pooling model's configuration."""
    source, head = ModelSource.of(vllm_config), Head.of(vllm_config.model_config)
    assert geometry.pooling is not None
    if geometry.pooling.is_encoder:
        return EncoderBuilder(source, head)
    return PoolingDecoderBuilder(source, geometry, head)
