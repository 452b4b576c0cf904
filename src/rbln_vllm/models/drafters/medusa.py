# SPDX-License-Identifier: Apache-2.0
"""Medusa: heads that guess several tokens from the target's last hidden state.

Cai et al., "Medusa" (arXiv 2401.10774), through vLLM's module.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MedusaHeads:
    """Builds the heads with their weights."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        speculation = vllm_config.speculative_config
        assert speculation is not None
        self._config = vllm_config
        with set_current_vllm_config(vllm_config):
            self._model: Any = get_model(
                vllm_config=vllm_config,
                model_config=speculation.draft_model_config,
                load_config=get_draft_load_config(vllm_config),
            )
        self.target_width = int(vllm_config.model_config.get_hidden_size())
        self.dtype: torch.dtype = vllm_config.model_config.dtype

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._model
        return module

    def capturing(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = set_current_vllm_config(self._config)
        return context

    def drafts(self, target_BW: Tensor) -> Tensor:
        """The likeliest token of each head, int64 ``[B, heads]``."""
        states = self._model(target_BW)
        heads = zip(self._model.lm_heads, states, strict=True)
        return torch.stack([self._token(head, state_BH) for head, state_BH in heads], dim=1)

    def _token(self, head: torch.nn.Module, state_BH: Tensor) -> Tensor:
        logits_BV: Tensor = self._model.logits_processor(head, state_BH)
        token_B = logits_BV.argmax(dim=-1)
        # A head may know only the most frequent tokens.
        tokens_V: Tensor | None = self._model.token_map
        return token_B if tokens_V is None else tokens_V.index_select(0, token_B)
