# SPDX-License-Identifier: Apache-2.0
"""The model implementation of a finished configuration."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from rbln_vllm.config import ModelImpl, OptimumRBLNConfig
from rbln_vllm.geometry import Geometry, options_of
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.programs import ProgramKey
from rbln_vllm.speculation.draft_models import drafts_by_program
from rbln_vllm.toolchain import Adapters, Captured, Toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ModelBuilder(Protocol):
    """A model from which programs are compiled."""

    kv_layers: tuple[KVLayer, ...]
    adapters: Adapters | None
    """The linears that have adapters; None without ``--enable-lora``."""

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        ...


class TargetBuilder(ModelBuilder, Protocol):
    """A builder whose model a drafter may read."""

    @property
    def module(self) -> torch.nn.Module:
        """The model with its weights."""
        ...


def implementation_of(vllm_config: "VllmConfig") -> ModelImpl:
    """What was selected when the engine's arguments were resolved."""
    return "transformers" if isinstance(options_of(vllm_config), OptimumRBLNConfig) else "vllm"


def builder_of(vllm_config: "VllmConfig", geometry: Geometry) -> ModelBuilder:
    """Build the model of the selected implementation, and its drafter if that is a model; only
    their modules are imported."""
    if geometry.pooling is not None:
        from rbln_vllm.models.transformers.pooling import pooling_builder

        return pooling_builder(vllm_config, geometry)
    target = _target_of(vllm_config, geometry)
    if not drafts_by_program(vllm_config):
        return target
    from rbln_vllm.models.drafters.builder import with_drafter

    return with_drafter(vllm_config, geometry, target)


def _target_of(vllm_config: "VllmConfig", geometry: Geometry) -> TargetBuilder:
    if implementation_of(vllm_config) == "transformers":
        from rbln_vllm.models.transformers.builder import TransformersModelBuilder
        from rbln_vllm.models.transformers.source import ModelSource

        source, shape = ModelSource.of(vllm_config), AdapterShape.of(vllm_config)
        return TransformersModelBuilder(source, geometry, shape)
    from rbln_vllm.models.vllm_builder import VllmModelBuilder

    return VllmModelBuilder(vllm_config, geometry)
