# SPDX-License-Identifier: Apache-2.0
"""Which drafts stand: exact verification by drawing from the target alone.

Speculative sampling (Leviathan et al., "Fast inference from transformers via speculative
decoding", ICML 2023; Chen et al., arXiv 2302.01318) accepts a draft x with probability
min(1, p(x) / q(x)) and draws from the normalised max(0, p - q) when it does not. Our drafters name
one token each time, so q is 1 there and 0 elsewhere: x is accepted with probability p(x), and what
is drawn instead comes from p without x. That is one draw from p, taken as acceptance when it is x.
So each position is sampled as it would be without drafts, by the same sampler and with the same
random number, and the drafts up to the first that differs stand. Output is therefore not only
distributed as without drafts: it is the same tokens, as far as the same logits are.

Whatever changes the target's distribution (grammars, penalties, minimum lengths ...) is applied to
each position as if the drafts before it had been output.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from rbln_vllm.worker.sampling import DrawKeys, SeededSampler
from rbln_vllm.worker.sampling.paths import is_built_in

Integers = NDArray[np.integer]
REJECTED = -1
"""As vLLM's runner knows it: no token."""
Outputs = Callable[[], Sequence[list[int]]]
"""The output of each request of the batch: the very lists that logits processors look at."""


@dataclass(frozen=True)
class ScheduledDrafts:
    """The drafts of each row of a decode step, in the order of the batch; some row has one.

    A row of ``d`` drafts has ``d + 1`` rows of logits, one after another: of its next token, and of
    the one after each draft.
    """

    ids_B: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not any(self.ids_B):
            raise ValueError("a step without drafts needs no verification")

    @classmethod
    def of(
        cls, request_ids: Sequence[str], scheduled: Mapping[str, Sequence[int]]
    ) -> "ScheduledDrafts | None":
        """What the scheduler says; None where it has scheduled no draft."""
        ids_B = tuple(tuple(scheduled.get(name, ())) for name in request_ids)
        return cls(ids_B) if any(ids_B) else None

    @property
    def most(self) -> int:
        """The longest row's drafts."""
        return max(map(len, self.ids_B))

    @cached_property
    def counts_B(self) -> Integers:  # noqa: N802 (a tensor's name ends in its axes)
        """Rows of logits of each request."""
        return np.array([len(ids) + 1 for ids in self.ids_B], dtype=np.int64)

    @cached_property
    def first_B(self) -> Integers:  # noqa: N802
        """The first row of logits of each request."""
        first_B: Integers = np.cumsum(self.counts_B) - self.counts_B
        return first_B

    def at(self, position: int) -> Integers:
        """The row of logits for the token after ``position`` drafts, ``[B]``; of a request with
        fewer, its last."""
        rows_B: Integers = self.first_B + np.minimum(position, self.counts_B - 1)
        return rows_B

    def accepted(self, token_BP: Integers) -> Integers:
        """How many drafts of each request stand, ``[B]``, when these tokens follow its known ones:
        ``token_BP[b, p]`` after ``p`` drafts."""
        is_equal_BP = np.zeros(token_BP.shape, dtype=bool)
        for row, ids in enumerate(self.ids_B):
            known = min(len(ids), token_BP.shape[1])
            is_equal_BP[row, :known] = token_BP[row, :known] == ids[:known]
        counts_B: Integers = np.logical_and.accumulate(is_equal_BP, axis=1).sum(axis=1)
        return counts_B


class Verifier:
    """Takes the place of vLLM's rejection sampler, with its call.

    ``outputs`` gives the output of each request of the batch so far.
    """

    def __init__(self, sampler: SeededSampler, keys: DrawKeys, outputs: Outputs) -> None:
        self._sampler, self._keys, self._outputs = sampler, keys, outputs

    def __call__(
        self,
        drafts: ScheduledDrafts,
        _draft_probs: None,
        logits_RV: Tensor,
        metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """New tokens int32 ``[B, 1 + d]``, ``REJECTED`` after those that stand, and what was asked
        of log-probabilities in the same order."""
        token_R = self._sampler.tokens_after_drafts(logits_RV, metadata, drafts.counts_B)
        if token_R is None:
            return self._one_after_another(drafts, logits_RV, metadata)
        positions_P = np.arange(drafts.most + 1)
        rows_BP = drafts.first_B[:, None] + np.minimum(positions_P, drafts.counts_B[:, None] - 1)
        token_BP = token_R.numpy()[rows_BP]
        return SamplerOutput(_standing(drafts, token_BP), logprobs_tensors=None)

    def _one_after_another(
        self, drafts: ScheduledDrafts, logits_RV: Tensor, metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Position by position through vLLM's code, which takes one row of logits a request."""
        self._sampler.mask(logits_RV)
        steps: list[SamplerOutput] = []
        with self._growing_outputs(drafts) as grow:
            for position in range(drafts.most + 1):
                rows_B = torch.from_numpy(drafts.at(position))
                with self._keys.looking_ahead(position):
                    steps.append(self._sampler(logits_RV[rows_B], _metadata_at(position, metadata)))
                token_BP = _tokens(steps)
                if not (drafts.accepted(token_BP) > position).any():
                    break
                grow(position)
        return SamplerOutput(_standing(drafts, token_BP), _logprobs(steps))

    @contextmanager
    def _growing_outputs(self, drafts: ScheduledDrafts) -> Iterator[Callable[[int], None]]:
        """Lets processors see drafts as output: the one at a position from its ``grow`` call on."""
        outputs_B = self._outputs()[: len(drafts.ids_B)]
        lengths_B = [len(output) for output in outputs_B]

        def grow(position: int) -> None:
            for output, ids in zip(outputs_B, drafts.ids_B, strict=True):
                output.extend(ids[position : position + 1])

        try:
            yield grow
        finally:
            for output, length in zip(outputs_B, lengths_B, strict=True):
                del output[length:]


def _metadata_at(position: int, metadata: SamplingMetadata) -> SamplingMetadata:
    """The step's, for the token after ``position`` drafts.

    What keeps a state of its own, which cannot be taken back, is applied once: budgets of thoughts
    and processors that are not vLLM's. Requests that they may change have no drafts.
    """
    processors = LogitsProcessors(
        _at_any_length(processor)
        for processor in metadata.logitsprocs.all
        if position == 0 or is_built_in(processor)
    )
    holder = metadata.thinking_budget_state_holder if position == 0 else None
    return replace(metadata, logitsprocs=processors, thinking_budget_state_holder=holder)


def _at_any_length(processor: LogitsProcessor) -> LogitsProcessor:
    return _MinTokensNow(processor) if type(processor) is MinTokensLogitsProcessor else processor


class _MinTokensNow(LogitsProcessor):
    """vLLM's minimum length, by the outputs as they are when it is applied.

    Its plain ``apply`` goes by their lengths when the step began.
    """

    def __init__(self, processor: MinTokensLogitsProcessor) -> None:
        self._processor = processor

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        raise NotImplementedError("it lives for one call of the sampler")

    def apply(self, logits: Tensor) -> Tensor:
        applied: Tensor = self._processor.apply_with_spec_decode(logits, [1] * logits.shape[0])
        return applied


def _tokens(steps: Sequence[SamplerOutput]) -> Integers:
    tokens_BP: Integers = torch.cat([step.sampled_token_ids for step in steps], dim=1).numpy()
    return tokens_BP


def _standing(drafts: ScheduledDrafts, token_BP: Integers) -> Tensor:
    """The tokens without those that follow a draft that does not stand; as wide as the longest."""
    accepted_B = drafts.accepted(token_BP)
    positions_P = np.arange(accepted_B.max() + 1)
    stands_BP = positions_P <= accepted_B[:, None]
    return torch.from_numpy(
        np.where(stands_BP, token_BP[:, : len(positions_P)], REJECTED).astype(np.int32)
    )


def _logprobs(steps: Sequence[SamplerOutput]) -> LogprobsTensors | None:
    """Of each token of ``[B, P]``, row by row, as vLLM's runner takes them."""
    parts = [step.logprobs_tensors for step in steps if step.logprobs_tensors is not None]
    if not parts:
        return None
    return LogprobsTensors(
        *(
            torch.stack(tensors, dim=1).flatten(0, 1)
            for tensors in zip(*(_fields(part) for part in parts), strict=True)
        )
    )


def _fields(part: LogprobsTensors) -> tuple[Tensor, Tensor, Tensor]:
    return part.logprob_token_ids, part.logprobs, part.selected_token_ranks
