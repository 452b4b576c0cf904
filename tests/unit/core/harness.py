# SPDX-License-Identifier: Apache-2.0
"""Drives a real scheduler with a fake runner, and checks what must hold after every step.

The text that comes out can be compared with :func:`expected_tokens`, which knows no scheduler.
"""

import copy
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rbln_vllm.config import RBLNConfig
from rbln_vllm.core.multi_step import steps_of
from rbln_vllm.core.scheduler import RBLNScheduler, tokens_left
from rbln_vllm.core.step import StepKind, StepPlan, chunk_start, classify
from tests.unit.core.fake_runner import NULL_BLOCK, VOCAB, FakeRunner, sample

BASE_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}


def expected_tokens(prompt: Sequence[int], max_tokens: int, max_model_len: int) -> list[int]:
    """What a request must produce, whatever runs beside it."""
    context = list(prompt)
    while len(context) < min(len(prompt) + max_tokens, max_model_len):
        context.append(sample(context))
    return context[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of ``length`` tokens; prompts of one seed share their prefix."""
    return [zlib.crc32(f"{seed}/{i}".encode()) % VOCAB for i in range(length)]


class SchedulerFactory:
    """Builds schedulers without a model; every option has a small default."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._grammars = StructuredOutputManager(config)
        init_none_hash(sha256)

    def __call__(
        self,
        *,
        chunk: int = 8,
        block: int = 4,
        blocks: int = 33,
        seqs: int = 4,
        max_len: int = 128,
        prefix: bool = False,
        max_prefill_run: int = 0,
        steps: int = 1,
        sub_block: int | None = None,
        events: bool = False,
        log_stats: bool = False,
        drafts: int = 0,
        cls: type[RBLNScheduler] = RBLNScheduler,
        spec: AttentionSpec | None = None,
        **scheduler_options: Any,
    ) -> RBLNScheduler:
        config = copy.copy(self._config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = max_len
        config.additional_config = RBLNConfig(
            max_prefill_run=max_prefill_run,
            max_decode_steps=steps,
            sub_block_size=sub_block,
            enable_sub_block_cache=sub_block is not None,
        )
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events, publisher="null")
        config.scheduler_config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            max_model_len=max_len,
            is_encoder_decoder=False,
            async_scheduling=False,
            **scheduler_options,
        )
        config.speculative_config = _speculation(config, drafts) if drafts else None
        config.cache_config = CacheConfig(block_size=block, enable_prefix_caching=prefix)
        config.cache_config.num_gpu_blocks = blocks
        kv_cache = _kv_cache(blocks, spec or _full_attention(block))
        return cls(config, kv_cache, self._grammars, block_size=block, log_stats=log_stats)


def _speculation(config: VllmConfig, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


def _full_attention(block: int) -> AttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)


def _kv_cache(blocks: int, spec: AttentionSpec) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    block: int,
    max_tokens: int = 4,
    priority: int = 0,
    arrival_time: float | None = None,
    params: SamplingParams | None = None,
    **options: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params or SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        priority=priority,
        arrival_time=arrival_time,
        block_hasher=get_request_block_hasher(block, sha256),
        **options,
    )


@dataclass
class Finished:
    """How a request left the engine."""

    reason: str
    stop_reason: int | str | None


@dataclass
class Driver:
    """Steps a scheduler and its runner, and checks what must hold after every step.

    ``depth`` 2 holds each output back until the next step is scheduled, as the engine does
    under async scheduling.
    """

    scheduler: RBLNScheduler
    depth: int = 1
    may_idle: bool = False
    table: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.scheduler.chunk_size, self.scheduler.block_size)
        self.requests: dict[str, Request] = {}
        self.free_at_start = self.free_blocks
        self._pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._waited: Counter[str] = Counter()

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, request_id: str, prompt: Sequence[int], **options: Any) -> Request:
        request = make_request(request_id, prompt, block=self.scheduler.block_size, **options)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self, abort_in_flight: Sequence[str] = ()) -> StepPlan:
        """Schedules and executes one step; returns what it was.

        ``abort_in_flight`` are aborted after the step ran and before its output is applied.
        """
        ready = {r.request_id for r in self.scheduler.running if tokens_left(r) == 1}
        unfinished = self.scheduler.get_num_unfinished_requests()
        self._before_step()
        output = self.scheduler.schedule()
        plan = classify(output, self.scheduler.chunk_size)
        assert plan == self.scheduler.last_step
        self._record(plan, output)
        self._pending.append((output, self.runner.execute(output)))
        self._after_run(output, frozenset(abort_in_flight))
        self._check_tables()
        self._check_chunk(plan, output)
        self._check_starvation(plan, ready, bool(output.preempted_req_ids))
        if not (self.may_idle or self.scheduler._refusals):
            assert (plan.kind is StepKind.EMPTY) == (unfinished == 0), "an empty step"
        if abort_in_flight:
            self.abort(*abort_in_flight)
        while len(self._pending) >= self.depth:
            self._deliver(*self._pending.popleft())
        self._after_step()
        return plan

    def _before_step(self) -> None:
        """For subclasses: nothing is scheduled yet."""

    def _after_run(self, output: SchedulerOutput, dying: frozenset[str]) -> None:
        """For subclasses: ``output`` has run; ``dying`` are about to be aborted."""

    def _after_step(self) -> None:
        """For subclasses: outputs that were due are delivered."""

    def run(self, limit: int = 2000) -> "Driver":
        """Steps until all requests are done; ``limit`` steps are the no-progress watchdog."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self._pending:
            self._deliver(*self._pending.popleft())
        assert not self.scheduler.has_unfinished_requests(), "no progress"
        self.check_idle()
        return self

    def check_idle(self) -> None:
        """Nothing of any request is left."""
        scheduler = self.scheduler
        assert self.free_blocks == self.free_at_start
        assert not self.runner.rows
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.deferred_waiting
        assert not scheduler._inflight_prefills
        manager = scheduler.step_content.sub_blocks
        if manager is not None:
            assert not manager._copying
            assert not manager._chains
            assert not manager._committed
            assert not manager._distrusted
            assert not manager._loading

    def check_text(self, *request_ids: str) -> None:
        """Every request (or those named) produced what it produces alone."""
        for req_id in request_ids or self.requests:
            request = self.requests[req_id]
            want = expected_tokens(
                request.prompt_token_ids, request.max_tokens, self.scheduler.max_model_len
            )
            assert self.tokens[req_id] == want, req_id

    def _deliver(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        for client in self.scheduler.update_from_output(output, runner_output).values():
            for out in client.outputs:
                self.tokens[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    self.finished[out.request_id] = Finished(
                        str(out.finish_reason), out.stop_reason
                    )

    def _record(self, plan: StepPlan, output: SchedulerOutput) -> None:
        self.plans.append(plan)
        what = "-"
        if plan.kind is StepKind.PREFILL:
            start = chunk_start(output)
            what = f"P {plan.request_ids[0]}[{start}:{start + plan.tokens[0]}]"
        elif plan.kind is StepKind.DECODE:
            steps = 1 if self.scheduler.num_spec_tokens else steps_of(output)
            what = f"D{steps if steps > 1 else ''} {','.join(plan.request_ids)}"
        running, waiting = self.scheduler.get_request_counts()
        self.table.append(f"{what} free={self.free_blocks} run={running} wait={waiting}")

    def _check_tables(self) -> None:
        """The runner's tables are the manager's, and a block has the owners it counts."""
        manager = self.scheduler.kv_cache_manager
        owners: Counter[int] = Counter()
        for request in self.scheduler.running:
            ids = manager.get_block_ids(request.request_id)[0]
            assert self.runner.rows[request.request_id].table == ids
            owners.update(ids)
        assert NULL_BLOCK not in owners
        if self.scheduler.step_content.sub_blocks is not None:
            for step in self.scheduler.step_content.sub_blocks._copying:
                owners.update(block.block_id for block in step.blocks)
        for block_id, count in owners.items():
            assert manager.block_pool.blocks[block_id].ref_cnt == count

    def _check_chunk(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Chunks start at multiples of C, but for the first one after a prefix hit."""
        fresh = {r.req_id for r in output.scheduled_new_reqs}
        fresh |= output.scheduled_cached_reqs.resumed_req_ids
        if plan.kind is StepKind.PREFILL:
            start = chunk_start(output)
            first_after_hit = plan.request_ids[0] in fresh and start > 0
            assert start % self.scheduler.chunk_size == 0 or first_after_hit

    def _check_starvation(self, plan: StepPlan, ready: set[str], preempts: bool) -> None:
        """No ready request waits for more than N prefill steps in a row.

        One that was preempted in this step no longer waits for a decode. Upstream ends a decode
        step at a row that has to preempt itself: those behind it have had their turn.
        """
        if plan.kind is StepKind.DECODE and preempts:
            self._waited.clear()
        limit = self.scheduler.turns.max_prefill_run
        ready &= {request.request_id for request in self.scheduler.running}
        for req_id in list(self._waited):
            if req_id not in ready or req_id in plan.request_ids:
                del self._waited[req_id]
        if plan.kind is StepKind.PREFILL:
            self._waited.update(ready)
        assert limit == 0 or all(n <= limit for n in self._waited.values())
