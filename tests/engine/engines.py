# SPDX-License-Identifier: Apache-2.0
"""Real engines for tests: starting one, looking inside it, and prompts to send.

With `VLLM_ENABLE_V1_MULTIPROCESSING=0` (see conftest.py) an engine lives in the test's own
process, so that scheduler, worker and programs can be inspected while it runs.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm.envs
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.tokenizers import cached_get_tokenizer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from rbln_vllm.core.multi_step import first_step_of
from rbln_vllm.core.scheduler import RBLNScheduler
from rbln_vllm.core.step import StepKind, StepPlan, classify
from rbln_vllm.worker.runner import ProgramRunner
from rbln_vllm.worker.worker import RBLNWorker
from tests.models import VOCAB_SIZE

BLOCK, CHUNK, MAX_LEN, SEQS = 32, 64, 256, 4
DEFAULTS: Mapping[str, Any] = {
    "model_impl": "vllm",  # test_transformers.py has the other one
    "dtype": "float32",
    "block_size": BLOCK,
    "max_num_batched_tokens": CHUNK,
    "max_model_len": MAX_LEN,
    "max_num_seqs": SEQS,
    "disable_log_stats": True,
}


@contextmanager
def running_engine(model_dir: Path, **arguments: Any) -> Iterator[LLM]:
    """An engine with `DEFAULTS`, changed by `arguments`; shut down at the end."""
    with started(model_dir, **{**DEFAULTS, **arguments}) as llm:
        yield llm


@contextmanager
def started(model_dir: Path, **arguments: Any) -> Iterator[LLM]:
    """An engine with these arguments only; shut down at the end."""
    _forget_other_engines()
    llm = LLM(str(model_dir), **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def _forget_other_engines() -> None:
    """What vLLM keeps in a process for every engine, and engines change.

    Where prompts may be embeddings it adds a token to the tokenizer, whose length then stays what
    it was: guidance of another engine would refuse the token beyond it.
    """
    vllm.envs.disable_envs_cache()
    cached_get_tokenizer.cache_clear()


@contextmanager
def own_process() -> Iterator[None]:
    """Engines that start in the block live in processes of their own, as a user's do.

    Spawned, see conftest.py: test_start_method.py has an engine that is forked, by a plain script.
    """
    with environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"):
        yield


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Sets variables (None removes one) and puts the old values back."""
    before = {name: os.environ.get(name) for name in variables}
    _write_environment(variables)
    try:
        yield
    finally:
        _write_environment(before)


def _write_environment(variables: Mapping[str, str | None]) -> None:
    vllm.envs.disable_envs_cache()  # an engine in this process has frozen what it read
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def core_of(llm: LLM) -> EngineCore:
    """The engine core, which lives in this process."""
    core = llm.llm_engine.engine_core.engine_core
    assert isinstance(core, EngineCore)
    return core


def scheduler_of(llm: LLM) -> RBLNScheduler:
    scheduler = core_of(llm).scheduler
    assert isinstance(scheduler, RBLNScheduler)
    return scheduler


def worker_of(llm: LLM) -> RBLNWorker:
    worker = core_of(llm).model_executor.driver_worker.worker
    assert isinstance(worker, RBLNWorker)
    return worker


def runner_of(llm: LLM) -> ProgramRunner:
    return worker_of(llm).model_runner


def free_blocks(llm: LLM) -> int:
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def kv_pools(llm: LLM) -> list[Tensor]:
    """The KV pool of each layer, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
    context = runner_of(llm).compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values()]


def report(llm: LLM) -> dict[str, int]:
    """The program counters of the one worker."""
    (counters,) = llm.collective_rpc("program_report")
    assert isinstance(counters, dict)
    return counters


FORWARDS = ("prefill", "decode")


@dataclass
class Step:
    """One step of the engine: what was scheduled, and the programs that ran for it."""

    plan: StepPlan
    programs: list[str] = field(default_factory=list)

    @property
    def forward(self) -> str:
        """The program that computed hidden states; there must be exactly one."""
        (name,) = (name for name in self.programs if name.startswith(FORWARDS))
        return name


@contextmanager
def recorded_steps(llm: LLM) -> Iterator[list[Step]]:
    """Every step that runs, in order. Fails when none did: a spy must fire."""
    runner = runner_of(llm)
    executable = runner._store.executable
    steps: list[Step] = []
    execute_model, run = runner.execute_model, executable.run

    def recorded_step(output: SchedulerOutput, *args: Any) -> Any:
        plan = classify(_one_step(runner, output), runner._geometry.chunk)
        if plan.kind is not StepKind.EMPTY:  # nothing can run until a step in flight has ended
            steps.append(Step(plan))
        return execute_model(output, *args)

    def recorded_run(name: str, inputs: Mapping[str, Tensor], *tokens: int) -> tuple[Tensor, ...]:
        if name.startswith(FORWARDS) and any(n.startswith(FORWARDS) for n in steps[-1].programs):
            steps.append(Step(steps[-1].plan))  # a further one of the same turn
        steps[-1].programs.append(name)
        return run(name, inputs, *tokens)

    with (
        patch.object(runner, "execute_model", recorded_step),
        patch.object(executable, "run", recorded_run),
    ):
        yield steps
    assert any(step.programs for step in steps), "no program ran"


def _one_step(runner: ProgramRunner, output: SchedulerOutput) -> SchedulerOutput:
    """Each step of a turn is recorded as one of its own."""
    return output if runner.speculation is not None else first_step_of(output)


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random token ids that are no special tokens."""
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[RequestOutput]:
    """All prompts at once; outputs in their order."""
    inputs: Any = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
    outputs: list[RequestOutput] = llm.generate(inputs, params, use_tqdm=False)
    return outputs


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens_of(output: RequestOutput) -> list[int]:
    """Tokens of the first completion."""
    return list(output.outputs[0].token_ids)


def all_tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [tokens_of(output) for output in outputs]


def add(
    llm: LLM, request_id: str, tokens: Sequence[int], params: SamplingParams, **more: Any
) -> str:
    """Queues a request; `run_to_the_end` steps the engine. Returns the engine's own id for it."""
    inputs: Any = {"prompt_token_ids": list(tokens)}
    return str(llm.llm_engine.add_request(request_id, inputs, params, **more))


def run_to_the_end(
    llm: LLM, before_step: Mapping[int, Callable[[], object]] | None = None, limit: int = 2000
) -> dict[str, RequestOutput]:
    """Steps the engine until it is idle and nothing is left to do.

    `before_step` holds what to do before a step, by its number. Returns the last output of each
    request. Fails after `limit` steps: an engine must progress.
    """
    actions = dict(before_step or {})
    outputs: dict[str, RequestOutput] = {}
    for number in range(limit):
        actions.pop(number, lambda: None)()
        if not llm.llm_engine.has_unfinished_requests() and not actions:
            settle(llm)
            return outputs
        for output in llm.llm_engine.step():
            assert isinstance(output, RequestOutput)
            outputs[output.request_id] = output
    raise AssertionError(f"the engine is not idle after {limit} steps")


def settle(llm: LLM) -> None:
    """Ends the steps that were in flight when the last request ended, as a server does."""
    while core_of(llm).batch_queue:
        llm.llm_engine.step()


def check_idle(llm: LLM) -> None:
    """Nothing is left of any request, and every block but the reserved one is free."""
    settle(llm)
    scheduler, pool = scheduler_of(llm), scheduler_of(llm).kv_cache_manager.block_pool
    assert not [*scheduler.requests, *scheduler.running, *scheduler.waiting]
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert [block.block_id for block in pool.blocks if block.ref_cnt] in ([], [0])
    assert not llm.llm_engine.output_processor.request_states
    assert not llm.llm_engine.output_processor.parent_requests


@contextmanager
def counted_preemptions(llm: LLM) -> Iterator[list[str]]:
    """Ids of the requests that are preempted. Fails when none was."""
    scheduler = scheduler_of(llm)
    preempted: list[str] = []
    original = scheduler._preempt_request

    def preempt(request: Request, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(request, *args, **kwargs)

    with patch.object(scheduler, "_preempt_request", preempt):
        yield preempted
    assert preempted, "nothing was preempted"
