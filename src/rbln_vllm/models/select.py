# SPDX-License-Identifier: Apache-2.0
"""The model implementation of a finished configuration."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rbln_vllm.config import ModelImpl, OptimumRBLNConfig
from rbln_vllm.geometry import Geometry, options_of
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import Captured, Toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ModelBuilder(Protocol):
    """A model from which programs are compiled."""

    kv_layers: tuple[KVLayer, ...]

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        ...


def implementation_of(vllm_config: "VllmConfig") -> ModelImpl:
    """What was selected when the engine's arguments were resolved."""
    return "transformers" if isinstance(options_of(vllm_config), OptimumRBLNConfig) else "vllm"


def builder_of(vllm_config: "VllmConfig", geometry: Geometry) -> ModelBuilder:
    """Build the model of the selected implementation; only its modules are imported."""
    if implementation_of(vllm_config) == "transformers":
        from rbln_vllm.models.transformers.builder import TransformersModelBuilder
        from rbln_vllm.models.transformers.source import ModelSource

        return TransformersModelBuilder(ModelSource.of(vllm_config), geometry)
    from rbln_vllm.models.vllm_builder import VllmModelBuilder

    return VllmModelBuilder(vllm_config, geometry)
