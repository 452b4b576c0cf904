# SPDX-License-Identifier: Apache-2.0
"""From a plan to the builder that compiles its programs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.transformers.builder import TransformersModelBuilder
from rbln_vllm.models.transformers.pooling import EncoderBuilder, Head, PoolingDecoderBuilder
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.optimum.plan import CompilePlan
from rbln_vllm.pooling.reranker import ids_of_answers, is_original_reranker
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import Adapters, Captured, Toolchain

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class AheadBuilder(Protocol):
    """Compiles programs, in this process or in several that share its weights."""

    kv_layers: tuple[KVLayer, ...]
    adapters: Adapters | None
    """The linears that have adapters; None without any."""

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        ...

    def named_weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name they have. Loads the model."""
        ...


def builder_for(
    source: ModelSource, plan: CompilePlan, adapters: AdapterShape | None = None
) -> AheadBuilder:
    """ValueError for a classifier that the configuration does not describe."""
    if not plan.architecture.only_pools:
        return TransformersModelBuilder(source, plan.geometry, adapters)
    head = _head(source) if plan.architecture.classifies else None
    if plan.architecture.encoder:
        return EncoderBuilder(source, head)
    return PoolingDecoderBuilder(source, plan.geometry, head)


def _head(source: ModelSource) -> Head:
    dtype = _head_dtype(source.config, source.dtype)
    if not is_original_reranker(source.config):
        return Head(dtype)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.name, trust_remote_code=source.trust_remote_code
    )
    return Head(dtype, ids_of_answers(source.config, tokenizer))


def _head_dtype(config: "PretrainedConfig", model_dtype: torch.dtype) -> torch.dtype:
    """As vLLM decides when it serves: fp32, unless the configuration's ``head_dtype`` says "model"
    or names a type."""
    given: Any = getattr(config, "head_dtype", None)
    if given is None:
        return torch.float32
    if given == "model":
        return model_dtype
    found = getattr(torch, str(given).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"head_dtype {given!r} is not model, nor a type such as float32")
    return found
