# SPDX-License-Identifier: Apache-2.0
"""Drafters that read the target's hidden states: EAGLE, EAGLE-3 and a model's own MTP layers.

vLLM's modules, which build, load and share weights as they do in vLLM. Each token is read beside
the target's hidden state of the token before it, at that token's position.

Li et al., "EAGLE" (arXiv 2401.15077) and "EAGLE-3" (arXiv 2503.01840).
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.spec_decode.eagle import EagleProposer

from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.models.drafters.target_layers import reads_layers
from rbln_vllm.models.paged_module import PagedModule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORWARD = ("input_ids", "positions")
PAGED = ("block_table", "slots", "query_pos")


class HiddenStateDrafter:
    """Builds the drafter with its weights; ``target`` shares its embedding and head with it."""

    def __init__(self, vllm_config: "VllmConfig", target: torch.nn.Module) -> None:
        speculation = vllm_config.speculative_config
        assert speculation is not None
        self._paged = PagedModule(
            vllm_config,
            lambda: get_model(
                vllm_config=vllm_config,
                model_config=speculation.draft_model_config,
                load_config=get_draft_load_config(vllm_config),
            ),
        )
        self._model: Any = self._paged.module
        _Sharing(vllm_config, self._model).share(target)
        self.kv_layers = self._paged.kv_layers
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self._reads_layers = reads_layers(vllm_config)
        self.target_width = target_width(vllm_config, self._model)

    @property
    def module(self) -> torch.nn.Module:
        return self._paged.module

    def capturing(self) -> AbstractContextManager[None]:
        return self._paged.capturing()

    def combined(self, target_NW: Tensor) -> Tensor:
        """EAGLE-3 makes one state of those of several layers."""
        if not self._reads_layers:
            return target_NW
        combined_NH: Tensor = self._model.combine_hidden_states(target_NW)
        return combined_NH

    def forward(self, inputs: dict[str, Tensor], carried_NH: Tensor | None) -> tuple[Tensor, ...]:
        """States for the head, and those to carry on: before the last norm in EAGLE-3."""
        pool = [tensor for name, tensor in inputs.items() if name not in FORWARD + PAGED]
        paged = PagedInputs(*(inputs[name] for name in PAGED))
        with self._paged.attending(paged, pool):
            output = self._model(hidden_states=carried_NH, **{n: inputs[n] for n in FORWARD})
        if isinstance(output, Tensor):
            return (output,)
        states_NH, carried = output
        return (states_NH,) if states_NH is carried else (states_NH, carried)

    def tokens(self, states_BH: Tensor) -> Tensor:
        """As vLLM's argmax over the target's vocabulary, which it scatters the drafter's into."""
        offsets_V: Tensor | None = getattr(self._model, "draft_id_to_target_id", None)
        if offsets_V is None:
            tokens_B: Tensor = self._model.compute_logits(states_BH).argmax(dim=-1)
            return tokens_B
        logits_BV = self._model.logits_processor(self._model.lm_head, states_BH)
        drafts_B: Tensor = logits_BV.argmax(dim=-1)
        return drafts_B + offsets_V.index_select(0, drafts_B)


def target_width(vllm_config: "VllmConfig", drafter: torch.nn.Module) -> int:
    """Elements of the target's states that a token's pass begins with."""
    if reads_layers(vllm_config):
        return int(getattr(drafter, "model").fc_input_size)  # noqa: B009 (no type has it)
    return int(vllm_config.model_config.get_hidden_size())


class _Sharing(EagleProposer):
    """Upstream's rules of which of the target's weights a drafter uses."""

    def __init__(self, vllm_config: "VllmConfig", drafter: torch.nn.Module) -> None:
        # Nothing of upstream's: it makes the buffers of a proposer.
        self.vllm_config, self.model = vllm_config, drafter
        self.use_local_argmax_reduction = False
        self.draft_model_config = None

    def share(self, target: torch.nn.Module) -> None:
        self._maybe_share_embeddings(target)
        self._maybe_share_lm_head(target)
