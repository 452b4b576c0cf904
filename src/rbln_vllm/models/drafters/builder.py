# SPDX-License-Identifier: Apache-2.0
"""A target and its drafter, built together: one artifact holds the programs of both."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.drafters.compiler import DraftCompiler, HeadsCompiler, NetworkCompiler
from rbln_vllm.models.drafters.network import DraftNetwork
from rbln_vllm.models.drafters.target_layers import reads_layers, return_layers
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.select import TargetBuilder, implementation_of
from rbln_vllm.programs import DRAFT_ROLES, ProgramKey
from rbln_vllm.toolchain import Captured, Toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DraftingBuilder:
    """Compiles the programs of a model and those of its drafter, whose layers come last in the
    pool."""

    def __init__(self, target: TargetBuilder, drafter: DraftCompiler) -> None:
        self._target, self._drafter = target, drafter
        self.kv_layers: tuple[KVLayer, ...] = target.kv_layers + drafter.kv_layers
        self.adapters = target.adapters  # a drafter has none

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        drafts = [key for key in keys if key.role in DRAFT_ROLES]
        targets = [key for key in keys if key.role not in DRAFT_ROLES]
        if targets:
            yield from self._target.compile(targets, toolchain)
        if drafts:
            yield from self._drafter.compile(drafts, toolchain)


def with_drafter(
    vllm_config: "VllmConfig", geometry: Geometry, target: TargetBuilder
) -> DraftingBuilder:
    """Add the drafter of ``speculative_config``, one of ``PROGRAM_METHODS``."""
    speculation = vllm_config.speculative_config
    assert speculation is not None
    num_drafts = int(speculation.num_speculative_tokens)
    if speculation.method == "medusa":
        from rbln_vllm.models.drafters.medusa import MedusaHeads

        return DraftingBuilder(target, HeadsCompiler(MedusaHeads(vllm_config), num_drafts))
    network = _network(vllm_config, geometry, target)
    first_layer = len(target.kv_layers)
    return DraftingBuilder(target, NetworkCompiler(network, geometry, num_drafts, first_layer))


def _network(vllm_config: "VllmConfig", geometry: Geometry, target: TargetBuilder) -> DraftNetwork:
    speculation = vllm_config.speculative_config
    assert speculation is not None
    if speculation.method == "draft_model":
        from rbln_vllm.models.drafters import causal

        if implementation_of(vllm_config) == "transformers":
            return causal.transformers_causal_drafter(vllm_config, geometry)
        return causal.vllm_causal_drafter(vllm_config, geometry)
    from rbln_vllm.models.drafters.hidden_states import HiddenStateDrafter

    module: torch.nn.Module = target.module
    if reads_layers(vllm_config):
        return_layers(vllm_config, module)
    return HiddenStateDrafter(vllm_config, module)
