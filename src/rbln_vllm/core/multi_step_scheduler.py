# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, able to schedule several decode steps as one turn of the engine."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from rbln_vllm import envs
from rbln_vllm.config import RBLNConfigBase, effective_max_decode_steps
from rbln_vllm.core.multi_step import MultiStepPolicy
from rbln_vllm.core.refusing_scheduler import RefusingScheduler
from rbln_vllm.devices import resolve_profile


def decode_steps_limit(vllm_config: VllmConfig) -> int:
    """Returns ``max_decode_steps``, the option or else the device's default."""
    options = vllm_config.additional_config
    if isinstance(options, RBLNConfigBase):
        return effective_max_decode_steps(options, resolve_profile(envs.force_npu_name()))
    return int(options.get("max_decode_steps", 1)) if isinstance(options, Mapping) else 1


class MultiStepScheduler(RefusingScheduler):
    """Upstream's decisions; says how many steps a turn may have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.multi_step = MultiStepPolicy(
            self._most_decode_steps(), self.max_model_len, self.max_num_scheduled_tokens
        )

    def _most_decode_steps(self) -> int:
        """One where somebody else looks at each token before the next one is computed."""
        named = getattr(self.vllm_config.model_config, "logits_processors", None)
        processors = named or entry_points(group=LOGITSPROCS_GROUP)
        if self.num_spec_tokens or self.connector is not None or processors:
            return 1
        return decode_steps_limit(self.vllm_config)

    def steps_of_turn(self, rows: list[Request]) -> int:
        """The decode steps that a turn of these rows has, if nothing waits for its end."""
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return self.multi_step.steps(rows, free_blocks, self.block_size)

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> SpecDecodingStats | None:
        """None without speculative decoding: the steps of a turn are no drafts."""
        return super().make_spec_decoding_stats(*args, **kwargs) if self.num_spec_tokens else None
