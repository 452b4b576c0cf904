# SPDX-License-Identifier: Apache-2.0
"""Which sampling parameters the programs serve, and which need vLLM's own processing: a table.

Where some row of a step asks for a parameter of vLLM's path, vLLM processes the logits of the step;
the draw is a program's on either path, so rows that ask for nothing get the same tokens.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata


class Path(StrEnum):
    PROGRAM = "program"
    VLLM = "vllm"


@dataclass(frozen=True)
class Parameter:
    """A field of ``SamplingParams`` that changes or reports what is sampled.

    ``asked`` says whether some row of a step asks for it; parameters of programs need not say.
    """

    name: str
    path: Path
    asked: Callable[[SamplingMetadata], bool] | None = None

    def __post_init__(self) -> None:
        if (self.path is Path.VLLM) != (self.asked is not None):
            raise ValueError(
                f"{self.name}: a parameter of vLLM's path, and no other, is looked for"
            )


def _penalties(metadata: SamplingMetadata) -> bool:
    return not metadata.no_penalties


def _holds_thoughts(metadata: SamplingMetadata) -> bool:
    holder = metadata.thinking_budget_state_holder
    return holder is not None and bool(holder.has_tracked_requests())


def _biases(metadata: SamplingMetadata) -> bool:
    return any(
        processor.biases
        for processor in metadata.logitsprocs.all
        if type(processor) is LogitBiasLogitsProcessor
    )


def _forbids_an_end(metadata: SamplingMetadata) -> bool:
    return any(
        processor.min_toks
        for processor in metadata.logitsprocs.all
        if type(processor) is MinTokensLogitsProcessor
    )


def _has_min_p(metadata: SamplingMetadata) -> bool:
    """Not where all rows are greedy: the largest logit stays the largest."""
    return not metadata.all_greedy and any(
        processor.min_p_count
        for processor in metadata.logitsprocs.argmax_invariant
        if type(processor) is MinPLogitsProcessor
    )


_BUILT_IN = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


def is_built_in(processor: LogitsProcessor) -> bool:
    """Whether it is vLLM's: a function of its request's parameters and output so far."""
    return type(processor) in _BUILT_IN


def rows_changed_by(processor: LogitsProcessor) -> Collection[int] | None:
    """The rows of the batch that a processor which is not vLLM's may change; None where nobody
    knows.

    An ``AdapterLogitsProcessor`` has a processor for each request that asks for one.
    """
    kind = type(processor)
    adapter = AdapterLogitsProcessor
    if not isinstance(processor, adapter):
        return None
    if (kind.apply, kind.update_state) != (adapter.apply, adapter.update_state):
        return None
    rows: Collection[int] = processor.req_info.keys()
    return rows


def _has_others(metadata: SamplingMetadata) -> bool:
    """Processors that are not vLLM's, unless they are known to leave all rows as they are."""
    processors = metadata.logitsprocs
    matter: Iterator[LogitsProcessor] = iter(processors.non_argmax_invariant)
    if not metadata.all_greedy:
        matter = processors.all
    others = (processor for processor in matter if not is_built_in(processor))
    return any(rows is None or len(rows) > 0 for rows in map(rows_changed_by, others))


PARAMETERS = (
    Parameter("temperature", Path.PROGRAM),
    Parameter("top_k", Path.PROGRAM),
    Parameter("top_p", Path.PROGRAM),
    Parameter("seed", Path.PROGRAM),
    Parameter("structured_outputs", Path.PROGRAM),
    Parameter("min_p", Path.VLLM, _has_min_p),
    Parameter("presence_penalty", Path.VLLM, _penalties),
    Parameter("frequency_penalty", Path.VLLM, _penalties),
    Parameter("repetition_penalty", Path.VLLM, _penalties),
    Parameter("logit_bias", Path.VLLM, _biases),
    Parameter("min_tokens", Path.VLLM, _forbids_an_end),
    Parameter("bad_words", Path.VLLM, lambda metadata: bool(metadata.bad_words_token_ids)),
    Parameter(
        "allowed_token_ids",
        Path.VLLM,
        lambda metadata: metadata.allowed_token_ids_mask is not None,
    ),
    Parameter("logprobs", Path.VLLM, lambda metadata: metadata.max_num_logprobs is not None),
    Parameter("logprob_token_ids", Path.VLLM, lambda metadata: bool(metadata.logprob_token_ids)),
    Parameter("thinking_token_budget", Path.VLLM, _holds_thoughts),
    Parameter("extra_args", Path.VLLM, _has_others),
)
"""``extra_args`` are the parameters of logits processors that are not vLLM's. ``prompt_logprobs``
come from logits programs and from no sampler."""


def reasons(metadata: SamplingMetadata) -> tuple[str, ...]:
    """The parameters for which this step needs vLLM's path; none where the programs serve it."""
    return tuple(p.name for p in PARAMETERS if p.asked is not None and p.asked(metadata))


def needs_vllm(metadata: SamplingMetadata) -> bool:
    return any(p.asked is not None and p.asked(metadata) for p in PARAMETERS)
