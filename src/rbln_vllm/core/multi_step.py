# SPDX-License-Identifier: Apache-2.0
"""Several decode steps in one turn of the engine.

Between two steps of a program the engine's Python costs one to three milliseconds, and the
processes that stream tokens run on the same cores as the program. Where nothing waits, the runner
therefore takes several steps before it comes back. To the scheduler such a turn is a step with
drafts whose tokens nobody knows yet and which are sure to stand: upstream grants their slots,
counts them and takes back what a row that ended early did not use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

UNKNOWN_TOKEN = -1
MOST_TOKENS = 32
"""Of a turn. A request that arrives waits for the turn; with many rows a step takes long."""


@dataclass(frozen=True)
class MultiStepPolicy:
    """At most ``most_steps`` decode steps a turn, none of them beyond the end of a row.

    ``step_tokens`` are the most tokens that upstream schedules at once.
    """

    most_steps: int
    max_model_len: int
    step_tokens: int

    def __post_init__(self) -> None:
        if self.most_steps < 1:
            raise ValueError(f"a turn has one decode step or more, got {self.most_steps}")

    def steps(self, rows: Sequence[Request], free_blocks: int, block_size: int) -> int:
        """The steps of the next turn of these ``rows``.

        One where a row needs more than what programs sample by themselves, or where the pool has
        no block for each row: upstream would preempt a request for slots that can wait.
        """
        tokens = min(MOST_TOKENS, self.step_tokens)
        steps = min(self.most_steps, tokens // max(1, len(rows)), block_size)
        if steps <= 1 or free_blocks < len(rows) or not all(map(_is_plain_request, rows)):
            return 1
        return max(1, min(steps, *map(self._tokens_to_come, rows))) if rows else 1

    def _tokens_to_come(self, request: Request) -> int:
        known = request.num_tokens + request.num_output_placeholders
        output = request.num_output_tokens + request.num_output_placeholders
        return int(min(request.max_tokens - output, self.max_model_len - known))


@contextmanager
def announced(rows: Sequence[Request], steps: int) -> Iterator[None]:
    """Has upstream schedule ``steps`` tokens of each row meanwhile."""
    if steps == 1:
        yield
        return
    for request in rows:
        request.spec_token_ids = [UNKNOWN_TOKEN] * (steps - 1)
    try:
        yield
    finally:
        for request in rows:  # upstream leaves them with rows that it did not schedule
            request.spec_token_ids = []


def ends_in_flight(request: Request) -> bool:
    """Whether the steps under way give ``request`` its last token."""
    under_way = request.num_output_placeholders
    return bool(under_way and request.num_output_tokens + under_way >= request.max_tokens)


def steps_of(output: SchedulerOutput) -> int:
    """The decode steps of a turn, where there is no speculative decoding."""
    drafts = output.scheduled_spec_decode_tokens
    return 1 + max(map(len, drafts.values()), default=0)


def first_step_of(output: SchedulerOutput) -> SchedulerOutput:
    """The first step of a turn, as upstream's runner knows it; slots are those of all steps."""
    if not output.scheduled_spec_decode_tokens:
        return output
    counts = dict.fromkeys(output.num_scheduled_tokens, 1)
    return replace(
        output,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=len(counts),
        scheduled_spec_decode_tokens={},
    )


def _is_plain_request(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and not request.resumable and is_plain(params)


def is_plain(params: SamplingParams) -> bool:
    """Whether a row's next token depends on its logits, temperature, top-k, top-p and seed only."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    given = (params.structured_outputs, params.logprobs, params.thinking_token_budget)
    asked = (
        params.logprob_token_ids,
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words,
        params.min_tokens,
        params.min_p,
        params.extra_args,
    )
    return not (any(penalties) or any(asked) or any(value is not None for value in given))
