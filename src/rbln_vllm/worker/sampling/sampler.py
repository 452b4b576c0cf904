# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler, with tokens from programs in place of its own search and draw."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from rbln_vllm.worker.sampling.keys import DrawKeys, Integers, mixed
from rbln_vllm.worker.sampling.paths import needs_vllm
from rbln_vllm.worker.sampling.programs import OFF, Draws, SamplerPrograms

GreedyTokens = Callable[[], Tensor]
"""The largest of each row of the step's logits, int64 ``[R]``, as the logits program found it."""


class SeededSampler(Sampler):
    """vLLM's sampler (``--no-rbln-use-custom-sampler``), whose seeds hold after a preemption too.

    Upstream's generators go on from draw to draw, also of tokens that are thrown away; here each
    draw has its own number. What a grammar forbids is masked by a program.
    """

    def __init__(
        self, model_config: ModelConfig, programs: SamplerPrograms, keys: DrawKeys
    ) -> None:
        super().__init__(model_config.logprobs_mode, model_config.use_fp64_gumbel)
        self._programs, self._keys = programs, keys
        self._bitmask_RW: Tensor | None = None

    def constrain(self, bitmask_RW: Tensor | None) -> None:
        """What grammars allow in the step to come, int32, a bit a token; None when there are none.

        Rows are those of the batch; a row of -1 is free.
        """
        self._bitmask_RW = bitmask_RW

    def mask(self, logits_RV: Tensor) -> None:
        """Apply what was given to :meth:`constrain`, once."""
        bitmask_RW, self._bitmask_RW = self._bitmask_RW, None
        if bitmask_RW is not None:
            self._programs.mask(logits_RV, bitmask_RW)

    def tokens_after_drafts(
        self, _logits_RV: Tensor, _metadata: SamplingMetadata, _counts_B: Integers
    ) -> Tensor | None:
        """Tokens of rows with drafts at once; None where they must be taken one after another."""
        return None

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        self.mask(logits)
        self._renew(sampling_metadata.generators)
        return self._vllm(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)

    def again(self, logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Tokens ``[R]`` of a further step of the turn, whose first one had the same metadata.

        They may be a program's own buffer, valid until its next run.
        """
        token_R: Tensor = self.forward(logits_RV, metadata).sampled_token_ids[:, 0]
        return token_R

    def _vllm(self, *args: Any) -> SamplerOutput:
        return cast(SamplerOutput, super().forward(*args))

    def _renew(self, generators: dict[int, torch.Generator]) -> None:
        """Set each generator for this one draw."""
        if not generators:
            return
        seed_R, position_R = (tensor.tolist() for tensor in self._keys.of_step())
        for row, generator in generators.items():
            generator.manual_seed(mixed(seed_R[row], position_R[row]))


class ProgramSampler(SeededSampler):
    """The RBLN sampler: see paths.py for what programs serve and what vLLM processes.

    vLLM's way converts all logits to fp32, sorts and searches them: 2 ms for 32 greedy rows of
    49,152, 100 times that with top-p.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        programs: SamplerPrograms,
        keys: DrawKeys,
        greedy_tokens: GreedyTokens,
    ) -> None:
        super().__init__(model_config, programs, keys)
        self._greedy_tokens = greedy_tokens
        self._processed = False  # the logits of the last step, by vLLM
        self.topk_topp_sampler = _ProgramDraw(model_config.logprobs_mode, programs, keys)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        self._processed = needs_vllm(sampling_metadata)
        if not self._processed:
            return _output(self._tokens(logits, sampling_metadata))
        self.mask(logits)
        return self._vllm(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)

    def again(self, logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
        if self._processed:
            return super().again(logits_RV, metadata)
        return self._tokens(logits_RV, metadata)

    def tokens_after_drafts(
        self, logits_RV: Tensor, metadata: SamplingMetadata, counts_B: Integers
    ) -> Tensor | None:
        """Tokens int64 ``[R]`` of ``counts_B`` rows of logits of each request, one after another;
        None where vLLM must process the logits.

        They are the program's own buffer, valid until its next run.
        """
        return None if needs_vllm(metadata) else self._tokens(logits_RV, metadata, counts_B)

    def _tokens(
        self, logits_RV: Tensor, metadata: SamplingMetadata, counts_B: Integers | None = None
    ) -> Tensor:
        bitmask_RW, self._bitmask_RW = self._bitmask_RW, None
        if metadata.all_greedy and bitmask_RW is None:
            token_R = self._greedy_tokens()
            if token_R.shape[0] == logits_RV.shape[0]:
                return token_R
        if metadata.all_greedy:
            draws = Draws.greedy(logits_RV.shape[0])
        else:
            assert metadata.temperature is not None
            draws = draws_of(
                metadata.temperature, metadata.top_k, metadata.top_p, self._keys, counts_B
            )
        return self._programs.sample(logits_RV, draws, bitmask_RW)[0]

    def greedy_sample(self, logits: Tensor) -> Tensor:
        """The first of the largest of each row, int64."""
        token_R, _ = self._programs.draw(logits, Draws.greedy(logits.shape[0]))
        return token_R.clone()


class _ProgramDraw(torch.nn.Module):
    """Takes the place of vLLM's top-k/top-p sampler, behind its logits processors."""

    def __init__(self, logprobs_mode: str, programs: SamplerPrograms, keys: DrawKeys) -> None:
        super().__init__()
        self._logprobs_mode, self._programs, self._keys = logprobs_mode, programs, keys

    def forward(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens, and the processed logits or log-probabilities if the mode asks for them.

        ``logits`` are divided by the temperature already; greedy rows, whose token the caller
        drops, by 1.
        """
        temperature_R = torch.ones(logits.shape[0])
        token_R, least_R = self._programs.draw(logits, draws_of(temperature_R, k, p, self._keys))
        if not self._logprobs_mode.startswith("processed"):
            return token_R, None
        processed_RV = logits.masked_fill(logits < least_R.unsqueeze(-1), -torch.inf)
        if self._logprobs_mode == "processed_logprobs":
            processed_RV = processed_RV.log_softmax(dim=-1, dtype=torch.float32)
        return token_R, processed_RV


def draws_of(
    temperature_B: Tensor,
    top_k_B: Tensor | None,
    top_p_B: Tensor | None,
    keys: DrawKeys,
    counts_B: Integers | None = None,
) -> Draws:
    """A step's draws, one for each request or ``counts_B``; None for a parameter that no row asks
    for."""
    seed_R, position_R = keys.of_step(counts_B)
    rows = seed_R.shape[0]

    def of_rows(parameter_B: Tensor) -> Tensor:
        if counts_B is None:
            return parameter_B[:rows]
        return parameter_B[: len(counts_B)].repeat_interleave(torch.from_numpy(counts_B))

    return Draws(
        of_rows(temperature_B),
        torch.full((rows,), OFF, dtype=torch.int32) if top_k_B is None else of_rows(top_k_B),
        torch.ones(rows) if top_p_B is None else of_rows(top_p_B),
        seed_R,
        position_R,
    )


def _output(token_R: Tensor) -> SamplerOutput:
    return SamplerOutput(
        sampled_token_ids=token_R.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
    )
