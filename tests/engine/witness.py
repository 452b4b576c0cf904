# SPDX-License-Identifier: Apache-2.0
"""Sees which features an engine's scheduler applies to each request while it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from vllm import LLM
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rbln_vllm.core.step import StepKind, chunk_start, classify
from tests.engine.engines import scheduler_of
from tests.feature_pairs import Feature


class Witness:
    """``seen`` holds the features of each request, by the engine's own id of it."""

    def __init__(self, llm: LLM) -> None:
        self.seen: defaultdict[str, set[Feature]] = defaultdict(set)
        self._scheduler = scheduler_of(llm)
        self._chunk = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._chunks: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        watchers: Mapping[str, Callable[..., Any]] = {
            "schedule": self._schedule,
            "update_from_output": self._update,
            "get_grammar_bitmask": self._mask,
            "_preempt_request": self._preempt,
        }
        with ExitStack() as patches:
            for name, watch in watchers.items():
                call = partial(watch, getattr(self._scheduler, name))
                patches.enter_context(patch.object(self._scheduler, name, call))
            yield

    def _schedule(self, schedule: Callable[..., SchedulerOutput], *args: Any) -> SchedulerOutput:
        requests = self._scheduler.requests
        waited_for = {name for name, item in requests.items() if item.num_output_placeholders}
        output = schedule(*args)
        for name in waited_for & set(output.num_scheduled_tokens):
            self.seen[name].add(Feature.ASYNC)
        if classify(output, self._chunk).kind is StepKind.PREFILL:
            self._see_chunk(output)
        return output

    def _see_chunk(self, output: SchedulerOutput) -> None:
        """A second chunk of a prompt, not of what was output before a preemption."""
        (name,) = output.num_scheduled_tokens
        if chunk_start(output) < self._scheduler.requests[name].num_prompt_tokens:
            self._chunks[name] += 1
        if self._chunks[name] > 1:
            self.seen[name].add(Feature.CHUNKS)

    def _update(
        self, update: Callable[..., Any], scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> Any:
        for name in scheduled.scheduled_spec_decode_tokens:
            accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            self._accepted[name] += accepted
            self._rejected[name] += scheduled.num_scheduled_tokens[name] - 1 - accepted
            if self._accepted[name] and self._rejected[name]:
                self.seen[name].add(Feature.SPECULATION)
        return update(scheduled, output)

    def _mask(self, mask: Callable[..., Any], scheduled: SchedulerOutput) -> Any:
        masks = mask(scheduled)
        for name in masks.structured_output_request_ids if masks else ():
            self.seen[name].add(Feature.STRUCTURED)
        return masks

    def _preempt(
        self, preempt: Callable[..., Any], request: Request, *args: Any, **more: Any
    ) -> Any:
        self.seen[request.request_id].add(Feature.PREEMPTION)
        del self._chunks[request.request_id]
        return preempt(request, *args, **more)
