# SPDX-License-Identifier: Apache-2.0
"""What a step is: one prefill chunk, or one decode batch, never both.

The scheduler and the runner both call :func:`classify` on the same ``SchedulerOutput``. It
looks only at token counts, so the two agree without sharing any state:

* a row whose tokens, drafts left out, number exactly one is a **decode row**;
* a row with more is a **prefill chunk** and must be alone in its step.

So a request with one token left runs through the decode program wherever it comes from: the
last token of a prompt of kC + 1 tokens, a one-token prompt, a prefix hit that leaves one
token, a resumed request. That a request has output tokens says nothing about its kind.
"""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

from vllm.v1.core.sched.output import SchedulerOutput


class StepKind(Enum):
    """Which family of programs a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    EMPTY = "empty"


class StepRuleError(RuntimeError):
    """A step that no program can run; a fault of the scheduler, not of a request."""


@dataclass(frozen=True)
class StepPlan:
    """One step: ``tokens[i]`` tokens (drafts included) of request ``request_ids[i]``."""

    kind: StepKind
    request_ids: tuple[str, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.request_ids) != len(self.tokens) or any(n < 1 for n in self.tokens):
            raise StepRuleError(f"every request of a step needs one token or more: {self}")
        if (self.kind is StepKind.EMPTY) != (not self.request_ids):
            raise StepRuleError(f"a step is empty exactly when it has no requests: {self}")
        if self.kind is StepKind.PREFILL and len(self.request_ids) != 1:
            raise StepRuleError(f"a prefill step holds one request and no decode rows: {self}")


EMPTY_STEP = StepPlan(StepKind.EMPTY, (), ())


def classify(output: SchedulerOutput, chunk_size: int) -> StepPlan:
    """Names the step in ``output`` and checks the step rule.

    Args:
        output: what ``schedule()`` returned.
        chunk_size: C, the tokens of a prefill program.

    Raises:
        StepRuleError: prefill mixed with anything else, or a chunk that leaves its window
            [kC, (k+1)C). A chunk may start inside the window (after a prefix hit).
    """
    counts = output.num_scheduled_tokens
    if not counts:
        return EMPTY_STEP
    drafts = output.scheduled_spec_decode_tokens
    is_prefill = any(n - len(drafts.get(req_id, ())) > 1 for req_id, n in counts.items())
    kind = StepKind.PREFILL if is_prefill else StepKind.DECODE
    plan = StepPlan(kind, tuple(counts), tuple(counts.values()))
    if is_prefill:
        _check_window(chunk_start(output), plan.tokens[0], chunk_size)
    return plan


def whole_prompts(output: SchedulerOutput) -> StepPlan:
    """The step of an encoder: any number of requests, each with its whole prompt.

    Raises:
        StepRuleError: a request whose prompt was begun in an earlier step.
    """
    counts = output.num_scheduled_tokens
    if not counts:
        return EMPTY_STEP
    begun = [name for name, start in row_starts(output, counts).items() if start]
    if begun:
        raise StepRuleError(f"an encoder computes whole prompts, not the rest of {begun}")
    return StepPlan(StepKind.ENCODE, tuple(counts), tuple(counts.values()))


def chunk_start(output: SchedulerOutput) -> int:
    """Returns the position of the first token of a prefill step's only chunk."""
    if output.scheduled_new_reqs:
        return int(output.scheduled_new_reqs[0].num_computed_tokens)
    return int(output.scheduled_cached_reqs.num_computed_tokens[0])


def row_starts(output: SchedulerOutput, request_ids: Container[str]) -> dict[str, int]:
    """Returns the position of the first token of those rows of a step that are named."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {req_id: start for req_id, start in starts.items() if req_id in request_ids}


def _check_window(start: int, length: int, chunk_size: int) -> None:
    if start // chunk_size != (start + length - 1) // chunk_size:
        raise StepRuleError(
            f"prefill chunk [{start}, {start + length}) crosses a multiple of the chunk size "
            f"{chunk_size}"
        )
