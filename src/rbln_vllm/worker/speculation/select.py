# SPDX-License-Identifier: Apache-2.0
"""The drafter of a configuration."""

from typing import TYPE_CHECKING

from rbln_vllm.geometry import Geometry
from rbln_vllm.speculation.draft_models import drafts_by_program
from rbln_vllm.worker.program_store import ProgramStore
from rbln_vllm.worker.speculation.drafters import Drafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def drafter_of(vllm_config: "VllmConfig", geometry: Geometry, store: ProgramStore) -> Drafter:
    """The drafter of ``speculative_config.method``; only its modules are imported.

    ``store`` holds the target's programs. Raises ValueError for a method that has none.
    """
    config = vllm_config.speculative_config
    assert config is not None
    if config.method == "ngram":
        from rbln_vllm.worker.speculation.host_drafters import NgramDrafter

        return NgramDrafter(vllm_config)
    if config.method == "suffix":
        from rbln_vllm.worker.speculation.host_drafters import SuffixDrafter

        return SuffixDrafter(vllm_config)
    if drafts_by_program(vllm_config):
        return _program_drafter(vllm_config, geometry, store)
    raise ValueError(f"Unsupported speculative decoding method {config.method!r}")


def _program_drafter(vllm_config: "VllmConfig", geometry: Geometry, store: ProgramStore) -> Drafter:
    """A model that drafts; its programs and its KV are with the target's."""
    from rbln_vllm.models.drafters.target_layers import reads_layers
    from rbln_vllm.worker.speculation.heads_drafter import HeadsDrafter
    from rbln_vllm.worker.speculation.program_drafter import DraftLimits, ProgramDrafter
    from rbln_vllm.worker.speculation.readings import Reading, StateReading, TokenReading

    config = vllm_config.speculative_config
    assert config is not None
    longest = min(geometry.max_model_len, int(config.draft_model_config.max_model_len))
    limits = DraftLimits(int(config.num_speculative_tokens), longest)
    if config.method == "medusa":
        return HeadsDrafter(limits, geometry.table, store)
    reads_tokens = config.method == "draft_model"
    reading: Reading = (
        TokenReading() if reads_tokens else StateReading(inner=reads_layers(vllm_config))
    )
    return ProgramDrafter(reading, limits, geometry.table, store)
