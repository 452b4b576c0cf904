# SPDX-License-Identifier: Apache-2.0
"""A small causal language model as the drafter of a larger one (``draft_model``).

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
"""

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "draft_model"
"""Before the names of the drafter's layers, which may be called as the target's are."""


class CausalModel(Protocol):
    """What both model implementations' builders offer of their model."""

    kv_layers: tuple[KVLayer, ...]

    @property
    def module(self) -> torch.nn.Module: ...

    def capturing(self) -> AbstractContextManager[None]: ...

    def forward(self, **inputs: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


class CausalDrafter:
    """A causal model that reads the tokens of the sequence and nothing of the target's."""

    target_width = 0

    def __init__(
        self, model: CausalModel, kv_layers: tuple[KVLayer, ...], dtype: torch.dtype
    ) -> None:
        self._model, self.kv_layers, self.dtype = model, kv_layers, dtype

    @property
    def module(self) -> torch.nn.Module:
        """Loads the weights when it is first asked for."""
        return self._model.module

    def capturing(self) -> AbstractContextManager[None]:
        return self._model.capturing()

    def combined(self, target_NW: Tensor) -> Tensor:
        raise NotImplementedError("a causal drafter reads nothing of the target's")

    def forward(self, inputs: dict[str, Tensor], carried_NH: Tensor | None) -> tuple[Tensor, ...]:
        return (self._model.forward(**inputs),)

    def tokens(self, states_BH: Tensor) -> Tensor:
        return self._model.logits(states_BH)[1]


def vllm_causal_drafter(vllm_config: "VllmConfig", geometry: Geometry) -> CausalDrafter:
    """The draft model through vLLM's own modules; builds it with its weights."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    from rbln_vllm.models.vllm_builder import VllmModelBuilder

    config = _draft_config(vllm_config)
    builder = VllmModelBuilder(config, geometry, PREFIX, get_draft_load_config(vllm_config))
    return CausalDrafter(cast(CausalModel, builder), builder.kv_layers, config.model_config.dtype)


def transformers_causal_drafter(vllm_config: "VllmConfig", geometry: Geometry) -> CausalDrafter:
    """The draft model through Hugging Face's module."""
    from rbln_vllm.models.transformers.builder import TransformersModelBuilder
    from rbln_vllm.models.transformers.source import ModelSource

    source = ModelSource.of(_draft_config(vllm_config))
    builder = TransformersModelBuilder(source, geometry)
    layers = tuple(replace(x, name=f"{PREFIX}.{x.name}") for x in builder.kv_layers)
    return CausalDrafter(cast(CausalModel, builder), layers, source.dtype)


def _draft_config(vllm_config: "VllmConfig") -> "VllmConfig":
    """The engine's configuration with the draft model in the target's place.

    A shallow copy: vLLM's ``replace`` would settle all of it anew for the smaller model.
    """
    speculation = vllm_config.speculative_config
    assert speculation is not None
    config = copy.copy(vllm_config)
    config.model_config, config.quant_config = speculation.draft_model_config, None
    config.speculative_config = None
    return config
