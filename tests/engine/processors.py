# SPDX-License-Identifier: Apache-2.0
"""A logits processor of a user's own, as `--logits-processors` takes it."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class OnlyToken(LogitsProcessor):
    """Forces the token that a request names in `extra_args`."""

    def __init__(self, _config: VllmConfig, _device: torch.device, _pinned: bool) -> None:
        self.tokens: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.tokens, batch_update, _token_of)

    def apply(self, logits: Tensor) -> Tensor:
        for row, token in self.tokens.items():
            kept = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


def _token_of(params: SamplingParams, _prompt: list[int] | None, _output: list[int]) -> int | None:
    return (params.extra_args or {}).get("only_token")
