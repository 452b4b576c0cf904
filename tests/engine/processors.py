# SPDX-License-Identifier: Apache-2.0
"""A logits processor of a user's own, as `--logits-processors` takes it."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logits_process import LogitsProcessor as RequestLogitsProcessor
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
)
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


class OnlyOwn(AdapterLogitsProcessor):
    """The same with a processor for each request that asks for it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token = _token_of(params, None, [])
        return None if token is None else _Forced(token)


class _Forced:
    """Has a state: the length of the output, which must grow by one from call to call.

    A request that was out of the batch gets another one.
    """

    def __init__(self, token: int) -> None:
        self._token, self._length = token, -1

    def __call__(self, output_ids: list[int], logits_V: Tensor) -> Tensor:
        assert self._length in (-1, len(output_ids) - 1)
        self._length = len(output_ids)
        forced_V = torch.full_like(logits_V, -torch.inf)
        forced_V[self._token] = logits_V[self._token]
        return forced_V
