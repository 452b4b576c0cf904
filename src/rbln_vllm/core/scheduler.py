# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, made to never mix prefill and decode in one step.

Upstream's ``schedule()`` is not copied. Each call here decides whose turn it is and runs
upstream's method on a restricted view of the queues:

* a running request is held out of the step by ``next_decode_eligible_step``, which makes
  upstream pass it over *before* it grants blocks (``DiffusionScheduler`` upstream holds requests
  back the same way). So no grant is ever made and then withdrawn. The request stays in
  ``self.running``: victims of preemption, the watermark and request counts are upstream's.
* ``max_num_active_reqs`` bounds how many waiting requests may be admitted: one or none.

When an attempt schedules nothing, the other turn is tried in the same call.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rbln_vllm import envs
from rbln_vllm.config import RBLNConfigBase, effective_max_prefill_run
from rbln_vllm.core.drafts import RowSlots, cut_to_pool, cut_to_step
from rbln_vllm.core.grammar_backends import use_backends_of_requests
from rbln_vllm.core.grammar_compiles import limit_compile_time
from rbln_vllm.core.kv_cache.setup import make_manager
from rbln_vllm.core.kv_cache.step_content import StepContent
from rbln_vllm.core.multi_step import announced, ends_in_flight
from rbln_vllm.core.multi_step_scheduler import MultiStepScheduler
from rbln_vllm.core.preemption import lacks_blocks
from rbln_vllm.core.step import EMPTY_STEP, StepPlan, classify, row_starts
from rbln_vllm.core.turns import Runnable, Turn, TurnPolicy
from rbln_vllm.devices import resolve_profile
from rbln_vllm.geometry import chunk_size


def prefill_run_limit(vllm_config: VllmConfig) -> int:
    """Returns ``max_prefill_run``, the option or else the device's default; 0 is unbounded."""
    options = vllm_config.additional_config
    if isinstance(options, RBLNConfigBase):
        return effective_max_prefill_run(options, resolve_profile(envs.force_npu_name()))
    return int(options.get("max_prefill_run", 0)) if isinstance(options, Mapping) else 0


def tokens_left(request: Request) -> int:
    """Returns the known tokens of ``request`` still to compute, drafts left out.

    1 is decode-ready, more is prefill, 0 waits for the output of a step in flight, be it the
    last. A preempted request that is resumed counts its generated tokens here like those of its
    prompt.
    """
    if ends_in_flight(request):
        return 0
    known = request.num_tokens + request.num_output_placeholders
    return int(known - request.num_computed_tokens)


class RBLNScheduler(MultiStepScheduler):
    """One prefill of at most one chunk, or one decode batch, per step."""

    max_num_active_reqs: int
    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limit_compile_time(self.structured_output_manager)
        use_backends_of_requests(self.structured_output_manager)
        self.chunk_size = chunk_size(self.vllm_config)
        self.turns = TurnPolicy(prefill_run_limit(self.vllm_config))
        self.last_step: StepPlan = EMPTY_STEP
        self._prefill_run = 0
        self._barred: frozenset[Turn] = frozenset()
        self._use_sub_blocks()
        self.step_content = StepContent(self.kv_cache_manager, self.kv_cache_config)
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            # Where the number of drafts may vary, upstream does not pad the first decode step of
            # a request with drafts that are none. Programs pad rows by themselves.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_active_reqs + 1)

    def _use_sub_blocks(self) -> None:
        """Replaces the manager upstream has made, before anything is in it."""
        manager = make_manager(self)
        if manager is not None:
            self.kv_cache_manager = manager
            if self.connector is not None:
                self.connector.bind_kv_cache_manager(manager)

    # -- the step ----------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules one prefill chunk or one decode batch.

        The output is empty only when nothing can run. ``throttle_prefills`` is upstream's
        data-parallel balancing and is passed on.

        Raises:
            StepRuleError: upstream scheduled what no program can run.
        """
        barred = self._barred_at_start()
        turn, decodes_wait = self._next_turn(barred)
        scheduled_before = set(self.prev_step_scheduled_req_ids)
        num_running = len(self.running)
        output = self._attempt(turn, throttle_prefills)
        while not output.num_scheduled_tokens and self._can_take_back(output):
            if len(self.running) == num_running:  # no preemption: trying again is no use
                barred.add(turn)
            turn, decodes_wait = self._next_turn(barred)
            if turn is Turn.IDLE:
                break
            empty = output
            self._take_back(empty, scheduled_before)
            num_running = len(self.running)
            output = self._attempt(turn, throttle_prefills)
            output.free_encoder_mm_hashes[:0] = empty.free_encoder_mm_hashes
        self._conclude(turn, decodes_wait, output)
        return output

    def _next_turn(self, barred: Collection[Turn]) -> tuple[Turn, bool]:
        """Returns the turn and whether decodes are ready, leaving out ``barred`` turns."""
        decode = Turn.DECODE not in barred and any(tokens_left(r) == 1 for r in self.running)
        prefill = Turn.PREFILL not in barred and self._can_prefill(decodes_ready=decode)
        return self.turns.choose(Runnable(prefill, decode), self._prefill_run), decode

    def _can_prefill(self, decodes_ready: bool) -> bool:
        running = self._running_prefill()
        if running is not None:
            # Upstream would preempt the request itself and lose its computed chunks.
            return not (decodes_ready and self._lacks_blocks(running))
        waiting = bool(self.waiting or self.kv_holding_waiting)
        return waiting and self._num_active() < self.max_num_active_reqs

    def _attempt(self, turn: Turn, throttle_prefills: bool) -> SchedulerOutput:
        """Runs upstream's ``schedule()`` on the requests that ``turn`` may touch."""
        prefill = self._running_prefill() if turn is Turn.PREFILL else None
        admits = turn is Turn.PREFILL and prefill is None

        def may_run(request: Request) -> bool:
            return request is prefill or (turn is Turn.DECODE and tokens_left(request) == 1)

        rows = [request for request in self.running if may_run(request)]
        if turn is Turn.DECODE and self.num_spec_tokens:
            self._cut_drafts(rows)
        with self._restricted(may_run, admits), announced(rows, self._steps_of(rows)):
            return super().schedule(throttle_prefills)

    def _steps_of(self, rows: list[Request]) -> int:
        """The decode steps of a turn of these rows: several where nothing waits for its end."""
        waits = self.waiting or self.kv_holding_waiting or self._running_prefill() is not None
        return 1 if waits else self.steps_of_turn(rows)

    def _cut_drafts(self, rows: list[Request]) -> None:
        """Leaves the drafts that a step of these rows can take without preempting a request.

        Upstream would make room for one request's guesses by computing another's prompt again.
        """
        config = self.vllm_config.speculative_config
        inputs = self.scheduler_config.max_num_batched_tokens
        inputs -= len(rows) * config.max_num_new_slots_for_drafting
        cut_to_step(rows, min(self.max_num_scheduled_tokens, inputs))
        slots = RowSlots(self.block_size, self.num_spec_tokens, self.num_lookahead_tokens)
        cut_to_pool(rows, self.kv_cache_manager, slots)

    @contextmanager
    def _restricted(self, may_run: Callable[[Request], bool], admits: bool) -> Iterator[None]:
        """Holds running requests out of the next ``schedule()``, admits one waiting or none."""
        held = [(r, r.next_decode_eligible_step) for r in self.running if not may_run(r)]
        limit = self.max_num_active_reqs
        for request, eligible_step in held:
            # schedule() first advances current_step by one, so + 2 is not reached in it.
            request.next_decode_eligible_step = max(eligible_step, self.current_step + 2)
        self.max_num_active_reqs = min(limit, self._num_active() + 1) if admits else 0
        try:
            yield
        finally:
            self.max_num_active_reqs = limit
            for request, eligible_step in held:
                request.next_decode_eligible_step = eligible_step

    def _conclude(self, turn: Turn, decodes_waited: bool, output: SchedulerOutput) -> None:
        if self.connector is not None and output.kv_connector_metadata is None:
            orders = super()._build_kv_connector_meta(self.connector, output)
            output.kv_connector_metadata = orders
        self.last_step = classify(output, self.chunk_size)
        if output.num_scheduled_tokens:
            self._barred = frozenset()
            self._prefill_run = self.turns.count(turn, decodes_waited, self._prefill_run)
        else:
            self._barred = frozenset({turn})

    # -- empty attempts ----------------------------------------------------------------------

    def _barred_at_start(self) -> set[Turn]:
        """Bars the turn of an empty step that had to be emitted, if the other one can run.

        Otherwise a prefill that cannot get blocks would keep decodes from freeing them.
        """
        if self._barred and self._next_turn(self._barred)[0] is not Turn.IDLE:
            return set(self._barred)
        return set()

    def _can_take_back(self, output: SchedulerOutput) -> bool:
        """Whether an empty ``output`` can be dropped without losing anything it carries.

        Connectors put their orders for the worker into it and forget them; the KV connector is
        not asked for its orders before the last attempt.
        """
        connectors = (self.ec_connector, self.aux_output_connector)
        return output.kv_cache_block_copies is None and all(c is None for c in connectors)

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata | None:
        """Leaves the orders of an empty attempt with the connector, for the one that is emitted.

        Otherwise every other step would be empty while a request waits for its KV.
        """
        if not scheduler_output.num_scheduled_tokens:
            return None
        orders: KVConnectorMetadata = super()._build_kv_connector_meta(connector, scheduler_output)
        return orders

    def _take_back(self, output: SchedulerOutput, scheduled_before: set[str]) -> None:
        """Puts back what upstream flushed into an ``output`` the runner will not see."""
        self.current_step -= 1
        self.finished_req_ids |= output.finished_req_ids
        self.reset_preempted_req_ids |= output.preempted_req_ids or set()
        self.prev_step_scheduled_req_ids = set(scheduled_before)

    # -- prefill -----------------------------------------------------------------------------

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Also passes over a waiting request whose adapter finds no slot.

        Upstream counts the adapters of the step alone. Here admissions and decodes are in
        different steps, and a later decode batch would hold more adapters than ``max_loras``.
        """
        ready = bool(super()._handle_blocked_waiting_request(request))
        if not ready or self.lora_config is None or request.lora_request is None:
            return ready
        active = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        adapter = request.lora_request.lora_int_id
        return adapter in active or len(active) < self.lora_config.max_loras

    def _running_prefill(self) -> Request | None:
        return next((r for r in self.running if tokens_left(r) > 1), None)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Ends a chunk at the next multiple of C; upstream asks here for every request.

        After a prefix hit the first chunk may start between two multiples and is shorter.
        Decode rows, with their drafts, are left alone.
        """
        known = request.num_tokens + request.num_output_placeholders
        if known - num_computed_tokens > 1:
            to_boundary = self.chunk_size - num_computed_tokens % self.chunk_size
            num_new_tokens = min(num_new_tokens, to_boundary)
        reserved = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return int(reserved)

    def _lacks_blocks(self, request: Request) -> bool:
        """Whether the next chunk of a running ``request`` needs more blocks than it can get."""
        computed = request.num_computed_tokens
        chunk = self._reserve_prefill_lookahead(request, computed, tokens_left(request))
        end = min(computed + chunk + self.num_lookahead_tokens, self.max_model_len)
        return lacks_blocks(self, request, end)

    def _num_active(self) -> int:
        """Counts what upstream holds against ``max_num_active_reqs``."""
        return len(self.running) + int(self.num_waiting_for_streaming_input)

    # -- what steps wrote --------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Applies a step's output; what it wrote can be hit from now on."""
        self.step_content.release_copied(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _withdraw(self, refused: Mapping[str, str], scheduler_output: SchedulerOutput) -> None:
        """Keeps what a refused step did not write out of the prefix cache."""
        for request_id, start in row_starts(scheduler_output, refused).items():
            if request_id in self.requests:
                self.step_content.withdraw(request_id, start)

    def _commit(self, scheduler_output: SchedulerOutput) -> None:
        """Offers for prefix hits what the step wrote, and says so to routers.

        Upstream has published by now, but events of a step must not wait for the next one.
        """
        events = self.step_content.commit(scheduler_output, self.requests)
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))


class RBLNAsyncScheduler(RBLNScheduler, AsyncScheduler):
    """The same rule over upstream's scheduler that runs one step ahead of the output."""
