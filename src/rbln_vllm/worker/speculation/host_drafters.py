# SPDX-License-Identifier: Apache-2.0
"""Drafters that look tokens up: vLLM's n-grams, and Arctic Inference's suffix trees."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NgramDrafter(HostDrafter):
    """What followed the last tokens of a request when they were there before (vLLM's search)."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self._proposer = NgramProposer(vllm_config)
        self.num_speculative_tokens = int(self._proposer.k)
        self._max_model_len = vllm_config.model_config.max_model_len

    def warm_up(self) -> None:
        """Have Numba compile the search, which takes seconds; vLLM leaves that to the first use."""
        lengths_B = np.ones(1, dtype=np.int32)
        tokens_BL = np.zeros((1, self._max_model_len), dtype=np.int32)
        self._proposer.propose(self.num_speculative_tokens, [[0]], lengths_B, tokens_BL)

    def propose(self, step: DraftStep) -> list[list[int]]:
        drafts_B: list[list[int]] = self._proposer.propose(
            self.num_speculative_tokens,
            [list(new) for new in step.sampled_B],
            step.lengths_B,
            step.tokens_BL,
        )
        return drafts_B


class SuffixDrafter(HostDrafter):
    """Suffix decoding: a tree of a request's own tokens and one of earlier outputs.

    Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), through their package
    ``arctic-inference``. Unlike vLLM's proposer this one keeps the tree of a request that is not
    in the step: here prefills and decodes are in different steps.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        config = vllm_config.speculative_config
        assert config is not None
        self.num_speculative_tokens = int(config.num_speculative_tokens)
        self._config, self._max_model_len = config, vllm_config.model_config.max_model_len
        self._trees = SuffixDecodingCache(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
        )

    def propose(self, step: DraftStep) -> list[list[int]]:
        return [self._draft(step, row) if new else [] for row, new in enumerate(step.sampled_B)]

    def forget(self, request_ids: Collection[str]) -> None:
        """Their outputs stay, for other requests."""
        for request_id in self._trees.active_requests & set(request_ids):
            self._trees.stop_request(request_id)

    def _draft(self, step: DraftStep, row: int) -> list[int]:
        request_id, length = step.request_ids[row], int(step.lengths_B[row])
        room = min(self.num_speculative_tokens, self._max_model_len - length - 1)
        new = list(step.sampled_B[row])
        if request_id not in self._trees.active_requests:
            self._start(request_id, step.tokens_BL[row, : length - len(new)])
        self._trees.add_active_response(request_id, new)
        if room <= 0:
            return []
        first = max(0, length - self._config.suffix_decoding_max_tree_depth)
        draft = self._trees.speculate(
            request_id,
            step.tokens_BL[row, first:length],
            max_spec_tokens=room,
            max_spec_factor=self._config.suffix_decoding_max_spec_factor,
            min_token_prob=self._config.suffix_decoding_min_token_prob,
        )
        return list(draft.token_ids)

    def _start(self, request_id: str, prompt_L: object) -> None:
        if request_id in self._trees.cached_requests:  # an earlier request of the same name
            self._trees.evict_cached_response(request_id)
        self._trees.start_request(request_id, prompt_L)
