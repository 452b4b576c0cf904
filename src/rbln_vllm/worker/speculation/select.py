# SPDX-License-Identifier: Apache-2.0
"""The drafter of a configuration."""

from typing import TYPE_CHECKING

from rbln_vllm.geometry import Geometry
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
    raise ValueError(f"Unsupported speculative decoding method {config.method!r}")
