# SPDX-License-Identifier: Apache-2.0
"""The runner: conducts a step through programs. Batch state and logits processing are vLLM's."""

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import BatchDescriptor
from vllm.sequence import IntermediateTensors
from vllm.tasks import GenerationTask
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import InputBatch

from rbln_vllm.core.refusal import RBLNModelRunnerOutput, refused_step
from rbln_vllm.core.step import StepKind, StepPlan, classify
from rbln_vllm.geometry import Geometry, options_of
from rbln_vllm.lora.manager import ProgramLoRAManager
from rbln_vllm.lora.refusal import without
from rbln_vllm.lora.slots import AdapterSlots
from rbln_vllm.models.kv_layers import KVLayer, kv_input_name
from rbln_vllm.models.kv_stand_in import KVLayerStandIn
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import MissingProgramError
from rbln_vllm.worker.inputs import StepInputs, step_inputs
from rbln_vllm.worker.kv_copies import CopiesKV, carry_out_copies
from rbln_vllm.worker.kv_memory import LazyPool
from rbln_vllm.worker.program_model import ProgramModel, StepOutputs
from rbln_vllm.worker.program_store import ProgramStore
from rbln_vllm.worker.sampling import DrawKeys, ProgramSampler, SamplerPrograms, SeededSampler
from rbln_vllm.worker.sampling.bitmasks import batch_bitmask
from rbln_vllm.worker.sampling.generators import drawing_nothing
from rbln_vllm.worker.speculation.drafters import Drafter
from rbln_vllm.worker.speculation.select import drafter_of
from rbln_vllm.worker.speculation.speculation import (
    count_thoughts_by_row,
    drafter_of_our_own,
    drafts_after,
    warn_of_idle_drafts,
)
from rbln_vllm.worker.speculation.verify import ScheduledDrafts, Verifier

RunnerOutput: TypeAlias = ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None


class ProgramRunner(CPUModelRunner):
    """Runs every step as one prefill program or one decode program.

    Overrides of upstream: the model is programs, never an eager module; a batch is padded by
    staging, not by the CUDA-graph dispatcher; KV layers come from the artifact.
    """

    model: ProgramModel
    lora_manager: ProgramLoRAManager

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, geometry: Geometry, store: ProgramStore
    ) -> None:
        with drafter_of_our_own(vllm_config):
            super().__init__(vllm_config, device)
        # The engine may schedule a step ahead; steps run in order, so here every token is known
        # when the next step is prepared and nothing of upstream's way around that is needed.
        self.use_async_scheduling = self.use_async_spec_decode = False
        # Embeddings are staged like all else that programs take.
        self.enable_prompt_embeds = False
        self.prepare_inputs_event = None
        self._geometry, self._store = geometry, store
        self._plan: StepPlan | None = None
        self._refused: set[str] = set()  # and not yet finished
        self._step: StepInputs | None = None
        self._outputs: StepOutputs | None = None
        self._lost: dict[str, str] = {}  # requests of the step without their adapter, and why
        self._kv_connector_output: KVConnectorOutput | None = None
        self._keys = DrawKeys(self.requests, lambda: self.input_batch, self.model_config.seed)
        self.sampler = self._make_sampler()
        self.speculation: Drafter | None = None
        if vllm_config.speculative_config is not None:
            warn_of_idle_drafts(self.input_batch.logitsprocs)
            self.speculation = drafter_of(vllm_config, geometry, store)
            self.rejection_sampler = Verifier(
                self.sampler, self._keys, lambda: self.input_batch.req_output_token_ids
            )

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Prepare the programs; the model itself is built only when one must be compiled."""
        if load_dummy_weights:
            raise ValueError("elastic expert parallelism is not supported: weights are compiled in")
        if multiprocessing.parent_process() is not None:
            # A process of the engine's own: what imports left stays for good, and each of the
            # collections that follow would walk it.
            gc.freeze()
        self._store.prepare()
        self.model = self._make_model()
        context = self.compilation_config.static_forward_context
        context.clear()
        if self.speculation is not None:
            self.speculation.load()
            context.clear()  # a drafter that was compiled has added its layers
        context.update({layer.name: KVLayerStandIn(layer) for layer in self.kv_layers})
        self._make_adapter_slots()

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """All that the KV pool holds: the target's layers, then the drafter's."""
        drafter = self.speculation
        return self._store.kv_layers + (() if drafter is None else drafter.kv_layers)

    def _make_adapter_slots(self) -> None:
        """Bind the memory of adapters to programs' inputs; nothing without ``--enable-lora``."""
        if self._store.adapters is None:
            return
        slots = AdapterSlots(self._store.adapters)
        self._store.executable.bind(slots.inputs)
        stored = self._store.stored_adapters
        self.lora_manager = ProgramLoRAManager(self.vllm_config, self.device, slots, stored)
        self.lora_manager.load_stored()

    def _make_model(self) -> ProgramModel:
        return ProgramModel(self._geometry, self._store)

    def _classify(self, scheduler_output: SchedulerOutput) -> StepPlan:
        return classify(scheduler_output, self._geometry.chunk)

    def get_supported_generation_tasks(self) -> list[GenerationTask]:
        return ["generate"]

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Allocate the pool and bind each layer's part to the programs' inputs."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, LazyPool())
        if not self._store.kv_layers:  # an encoder
            return
        context = self.compilation_config.static_forward_context
        self._store.executable.bind_kv(
            {
                kv_input_name(index): context[layer.name].kv_cache
                for index, layer in enumerate(self._store.kv_layers)
            }
        )
        if (drafter := self.speculation) is not None:
            layers = {layer.name: context[layer.name].kv_cache for layer in drafter.kv_layers}
            drafter.bind_kv(layers)
            count_thoughts_by_row(self.input_batch)

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> RunnerOutput:
        """Run one step. A step whose program may not be compiled now is refused, not fatal."""
        self._refused -= scheduler_output.finished_req_ids
        self._plan = self._classify(scheduler_output)
        pools: list[CopiesKV] = [self._store.executable]
        if self.speculation is not None:
            self.speculation.forget(scheduler_output.finished_req_ids)
            pools.append(self.speculation)
        scheduler_output = carry_out_copies(pools, scheduler_output)
        try:
            return cast(RunnerOutput, super().execute_model(scheduler_output, intermediate_tensors))
        except MissingProgramError as error:
            return self._refuse(error)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> RunnerOutput:
        try:
            with drawing_nothing(self.input_batch.generators, self._unfinished_prompts()):
                rest = self._constrain(grammar_output)
                output = super().sample_tokens(rest)
                if self._lost and isinstance(output, ModelRunnerOutput):
                    return without(output, self._lost)
                return cast(RunnerOutput, output)
        except MissingProgramError as error:
            return self._refuse(error)

    def _make_sampler(self) -> SeededSampler:
        programs, keys = SamplerPrograms(self._geometry.table, self._store), self._keys
        if options_of(self.vllm_config).use_custom_sampler:
            return ProgramSampler(
                self.model_config, programs, keys, lambda: self.model.greedy_tokens
            )
        return SeededSampler(self.model_config, programs, keys)

    def _constrain(self, grammar: GrammarOutput | None) -> GrammarOutput | None:
        """Give the sampler what grammars allow; returns what is left for upstream to apply."""
        state, batch = self.execute_model_state, self.input_batch
        if grammar is None or state is None:
            return grammar
        drafts: ScheduledDrafts | None = state.spec_decode_metadata
        if drafts is None:
            bitmask_RW = batch_bitmask(grammar, batch.req_id_to_index, batch.num_reqs)
        else:
            row_of = dict(zip(batch.req_ids, drafts.first_B.tolist(), strict=True))
            scheduled = state.scheduler_output.scheduled_spec_decode_tokens
            count_of = {name: len(ids) + 1 for name, ids in scheduled.items()}
            bitmask_RW = batch_bitmask(grammar, row_of, int(drafts.counts_B.sum()), count_of)
        self.sampler.constrain(bitmask_RW)
        return None

    def _unfinished_prompts(self) -> list[int]:
        """Rows whose prompt goes on: their token is dropped."""
        dropped_B = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return [int(row) for row in dropped_B.nonzero()[0]]

    @contextmanager
    def maybe_get_kv_connector_output(
        self, scheduler_output: SchedulerOutput, defer_finalize: bool = False
    ) -> Iterator[KVConnectorOutput | None]:
        """Keep what the KV connector reports, for a step that ends in a refusal."""
        with super().maybe_get_kv_connector_output(scheduler_output, defer_finalize) as output:
            self._kv_connector_output = output
            yield output

    def _refuse(self, error: MissingProgramError) -> RBLNModelRunnerOutput:
        """End the step without tokens; the scheduler ends its requests with an error."""
        assert self._plan is not None
        self.execute_model_state = None
        self._draft_token_ids = self._draft_token_req_ids = None
        if has_kv_transfer_group():
            # Connectors that keep a copy of blocks must not keep what was not computed.
            discard = getattr(get_kv_transfer_group(), "discard_stores", None)
            if discard is not None:
                discard()
        requests = list(self._plan.request_ids)
        # A step that was scheduled ahead is refused too.
        self._store.count_refused(len(set(requests) - self._refused))
        self._refused.update(requests)
        return refused_step(requests, str(error), self._kv_connector_output)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, *_args: Any, **_kwargs: Any
    ) -> tuple[CUDAGraphMode, BatchDescriptor, bool, None, None]:
        """Leave the batch as it is: staging pads it to the program's shape."""
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs), False, None, None

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[slice, ScheduledDrafts | None, int]:
        """Only what programs and sampling read: upstream's dozens of tensor operations take 1 ms.

        Returns which rows of the hidden states are sampled and the drafts among them, as upstream
        does.
        """
        counts_B, rows, batch = num_scheduled_tokens, len(num_scheduled_tokens), self.input_batch
        self._step = step_inputs(batch, counts_B, self._adapters_of(batch))
        ends_B = batch.num_computed_tokens_cpu[:rows] + counts_B
        self.discard_request_mask.np[:rows] = ends_B < batch.num_tokens_no_spec[:rows]
        np.cumsum(counts_B, out=self.query_start_loc.np[1 : rows + 1])
        # All tokens of a decode step are sampled; a prefill step has one row, and its last is.
        num_tokens = self._step.num_tokens
        assert self._plan is not None
        first = num_tokens - 1 if self._plan.kind is StepKind.PREFILL else 0
        self.model.begin_step(draws=not self.discard_request_mask.np[:rows].all())
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        return slice(first, num_tokens), ScheduledDrafts.of(batch.req_ids, scheduled), 1

    def _adapters_of(self, batch: InputBatch) -> NDArray[np.int32] | None:
        """The slot of each request's adapter, which is loaded if need be; None without any.

        Requests whose adapter cannot be loaded any more are computed as the base model's, and
        refused with the step's output.
        """
        self._lost = {}
        if not batch.lora_id_to_lora_request:
            return None
        failures = self.lora_manager.activate(batch.lora_id_to_lora_request.values())
        for lora_id, reason in failures.items():
            self._lost.update(dict.fromkeys(batch.lora_id_to_request_ids[lora_id], reason))
        return self.lora_manager.slots_of(batch.request_lora_mapping[: batch.num_reqs])

    def _get_slot_mappings(self, *_args: Any, **_kwargs: Any) -> tuple[None, None]:
        """Slots are among the program's inputs."""
        return None, None

    def _build_attention_metadata(
        self, *_args: Any, **_kwargs: Any
    ) -> tuple[dict[str, Any], StepInputs | None]:
        """No layer runs outside a program. Upstream asks a drafter only where this has a second
        part."""
        return {}, self._step

    def _model_forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Hidden states ``[n, hidden]`` of the step's ``n`` tokens."""
        assert self._step is not None
        self._outputs = self.model.run_step(self._program(), self._step)
        return self._outputs.hidden_NH

    def _program(self) -> ProgramKey:
        """The program of the current step."""
        plan, table = self._plan, self._geometry.table
        assert plan is not None
        assert plan.kind is not StepKind.EMPTY
        if plan.kind is StepKind.PREFILL:
            return table.prefill
        return table.decode_for(len(plan.request_ids), max(plan.tokens))

    def _input_fits_in_drafter(self, _common_attn_metadata: object) -> bool:
        """Drafters themselves end where the context does."""
        return True

    def propose_draft_token_ids(
        self, _scheduler_output: object, sampled_token_ids: Any, *_args: Any, **_kwargs: Any
    ) -> list[list[int]]:
        """Drafts for the next step, row by row."""
        assert self.speculation is not None
        assert self._step is not None
        assert self._outputs is not None
        return drafts_after(
            self.speculation, self.input_batch, self._step, sampled_token_ids, self._outputs
        )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        block_size = self.cache_config.block_size
        return {layer.name: layer.spec(block_size) for layer in self.kv_layers}
