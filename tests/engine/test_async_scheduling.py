# SPDX-License-Identifier: Apache-2.0
"""Scheduling a step ahead changes when things happen, and nothing that comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rbln_vllm.core.scheduler import RBLNAsyncScheduler
from rbln_vllm.executor.overlapped import OverlappedExecutor
from rbln_vllm.metrics.counters import Counter
from rbln_vllm.toolchain import MissingProgramError
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    add,
    check_idle,
    core_of,
    counted_preemptions,
    greedy,
    prompt,
    run_to_the_end,
    runner_of,
    running_engine,
    scheduler_of,
    tokens_of,
    worker_of,
)

NEW = 12
WAIT_S = 60
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, **more})


def constrained(max_tokens: int = 60, temperature: float = 0.0, **kind: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=5,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**kind),
    )


@dataclass(frozen=True)
class Load:
    """Requests, the step before which each arrives, and those that are aborted before a step."""

    requests: Sequence[tuple[list[int], SamplingParams]]
    arrivals: Mapping[int, int] = field(default_factory=dict)

    def run(self, llm: LLM, abort: Mapping[int, int] | None = None) -> list[RequestOutput | None]:
        """The last output of each request, by its number. ``abort`` maps steps to requests."""
        actions: dict[int, list[Callable[[], object]]] = {}
        for number, (tokens, params) in enumerate(self.requests):
            arrive = partial(add, llm, str(number), tokens, params.clone())
            actions.setdefault(self.arrivals.get(number, 0), []).append(arrive)
        for step, number in (abort or {}).items():
            leave = partial(llm.llm_engine.abort_request, [str(number)])
            actions.setdefault(step, []).append(leave)
        outputs = run_to_the_end(
            llm, {step: partial(_all_of, calls) for step, calls in actions.items()}
        )
        check_idle(llm)
        return [outputs.get(str(number)) for number in range(len(self.requests))]


def seen(output: RequestOutput | None) -> Any:
    """Everything of an output that a client sees."""
    assert output is not None
    parts = [
        (o.text, list(o.token_ids), o.finish_reason, o.stop_reason, _values(o.logprobs))
        for o in sorted(output.outputs, key=lambda o: o.index)
    ]
    return parts, _values(output.prompt_logprobs)


def _all_of(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _values(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        place and {token: (item.logprob, item.rank) for token, item in place.items()}
        for place in logprobs
    ]


LENGTHS = (5, 2 * CHUNK + 9, CHUNK, BLOCK - 1, 1, CHUNK + 1, 3 * CHUNK)


def load(*params: SamplingParams, every: int = 0, seed: int = 41) -> Load:
    """One request for each of the parameters, of several lengths, ``every`` so many steps."""
    requests = [
        (prompt(LENGTHS[i % len(LENGTHS)], seed=seed + i), item) for i, item in enumerate(params)
    ]
    return Load(requests, {i: every * i for i in range(len(params))})


LOADS: dict[str, Load] = {
    "greedy": load(*[greedy(NEW + i) for i in range(7)]),
    "arriving": load(*[greedy(20) for _ in range(7)], every=3),
    "one token": load(*[greedy(1), greedy(2), greedy(1), greedy(3)]),
    "to the longest": Load([(prompt(MAX_LEN - n, seed=n), greedy(NEW)) for n in (1, 2, 5, 12, 13)]),
    "seeds": load(*[sampled(seed=i, top_k=20, top_p=0.9) for i in range(7)], every=2),
    "two of each": load(*[sampled(seed=i, n=2) for i in range(3)]),
    "penalties": load(
        sampled(seed=1, repetition_penalty=1.7),
        greedy(30, frequency_penalty=1.5),
        greedy(30, presence_penalty=2.0),
        greedy(30, min_tokens=12, stop_token_ids=list(range(256))),
        sampled(seed=2, min_p=0.1, logit_bias={77: 5.0, 78: 5.0}),
        greedy(NEW, allowed_token_ids=[100, 101, 102]),
        greedy(NEW),
        every=2,
    ),
    "logprobs": load(
        greedy(NEW, logprobs=3),
        greedy(NEW, prompt_logprobs=2),
        sampled(seed=3, logprobs=0, prompt_logprobs=0),
        greedy(NEW),
    ),
    "stop": load(
        SamplingParams(temperature=0.0, max_tokens=60, stop=["e", "th"]),
        SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=list(range(3, 120))),
        greedy(25),
        every=4,
    ),
    "grammars": load(
        constrained(json=SCHEMA),
        greedy(30),
        constrained(regex="(ab|cd){2,9}!"),
        constrained(choice=["negative", "positive"], temperature=1.0),
        constrained(max_tokens=3, regex="[a-z]{40}"),
        sampled(seed=9),
        constrained(json=SCHEMA, temperature=0.8),
        every=3,
    ),
    "grammar after a long prompt": Load(
        [(prompt(3 * CHUNK, seed=n), constrained(regex=f"(a{n}|b{n}){{4,9}}c")) for n in range(4)],
        {0: 0, 1: 2, 2: 9, 3: 10},
    ),
    "the same prompt": Load([(prompt(2 * CHUNK + 5), greedy(NEW)) for _ in range(4)], {3: 9}),
}


@pytest.fixture(scope="module")
def ahead(tiny_llama_dir: Path) -> Iterator[LLM]:
    """One decode step a turn, so that turns can be counted by tokens."""
    with running_engine(tiny_llama_dir, additional_config={"max_decode_steps": 1}) as llm:
        yield llm


@pytest.fixture(scope="module")
def in_turn(tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(tiny_llama_dir, async_scheduling=False) as llm:
        yield llm


def reset(llm: LLM) -> None:
    assert llm.llm_engine.reset_prefix_cache()


class TestSameOutput:
    @pytest.mark.parametrize("name", LOADS)
    def test_as_in_turn(self, ahead: LLM, in_turn: LLM, name: str) -> None:
        for llm in (ahead, in_turn):
            reset(llm)
        got = [seen(output) for output in LOADS[name].run(ahead)]
        assert got == [seen(output) for output in LOADS[name].run(in_turn)]

    def test_under_preemption(self, tiny_llama_dir: Path, in_turn: LLM) -> None:
        """Half of what the requests need: victims lose their blocks with a step in flight."""
        heavy = load(
            greedy(60),
            sampled(seed=1, max_tokens=60),
            greedy(60, repetition_penalty=1.5),
            constrained(regex="[a-d]{50,60}"),
            greedy(60),
            every=2,
        )
        blocks = MAX_LEN // BLOCK + 1
        with (
            running_engine(tiny_llama_dir, num_gpu_blocks_override=blocks) as llm,
            counted_preemptions(llm),
        ):
            got = [seen(output) for output in heavy.run(llm)]
        assert got == [seen(output) for output in heavy.run(in_turn)]

    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_an_abort_at_every_step(self, ahead: LLM, victim: int) -> None:
        """Also of a request whose tokens are in flight: nobody else notices."""
        mixed = load(
            sampled(seed=1, max_tokens=8), constrained(9, regex="[a-d]+"), greedy(8, logprobs=1)
        )
        whole = [seen(output) for output in mixed.run(ahead)]
        for step in range(20):
            outputs = mixed.run(ahead, abort={step: victim})
            for number in {0, 1, 2} - {victim}:
                assert seen(outputs[number]) == whole[number], f"abort before step {step}"


class TestAhead:
    def test_is_the_default(self, ahead: LLM, in_turn: LLM) -> None:
        assert isinstance(scheduler_of(ahead), RBLNAsyncScheduler)
        assert isinstance(core_of(ahead).model_executor, OverlappedExecutor)
        assert not isinstance(scheduler_of(in_turn), RBLNAsyncScheduler)
        assert not isinstance(core_of(in_turn).model_executor, OverlappedExecutor)

    def test_a_step_is_scheduled_while_the_one_before_runs(self, ahead: LLM) -> None:
        """Each program waits inside for the schedule of the step after its own."""
        scheduler, runner = scheduler_of(ahead), runner_of(ahead)
        schedule, execute = scheduler.schedule, runner.execute_model
        counted, began = threading.Condition(), {"scheduled": 0, "executed": 0}
        overlapped: list[bool] = []

        def count(name: str, call: Any, *args: Any) -> Any:
            output = call(*args)
            with counted:
                began[name] += 1
                counted.notify_all()
            return output

        def waiting_launch() -> None:
            launched()
            with counted:
                is_ahead = lambda: began["scheduled"] > began["executed"] + 1  # noqa: E731
                overlapped.append(counted.wait_for(is_ahead, WAIT_S))

        launched = runner.model.launched
        with (
            _replaced(scheduler, schedule=partial(count, "scheduled", schedule)),
            _replaced(runner, execute_model=partial(count, "executed", execute)),
            _replaced(runner.model, launched=waiting_launch),
        ):
            load(greedy(NEW)).run(ahead)
        assert overlapped == [True] * NEW


class TestFailures:
    def test_a_failing_step_surfaces_as_what_it_was(self, tiny_llama_dir: Path) -> None:
        with running_engine(tiny_llama_dir) as llm:
            executable = runner_of(llm)._store.executable
            run, left = executable.run, [6]

            def failing_run(*args: Any) -> tuple[Tensor, ...]:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError("the device has gone")
                return run(*args)

            add(llm, "a", prompt(5), greedy(40))
            with (
                _replaced(executable, run=failing_run),
                pytest.raises(OSError, match="the device has gone"),
            ):
                run_to_the_end(llm, limit=8)

    def test_a_refused_step_ends_its_requests_only(self, ahead: LLM) -> None:
        """One is refused while the next step of the same requests is in flight already."""
        model = runner_of(ahead).model
        run_step, left = model.run_step, [4]

        def refusing_step(*args: Any) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise MissingProgramError("program decode_b2_q1 has not been compiled")
            return run_step(*args)

        with _replaced(model, run_step=refusing_step):
            outputs = load(greedy(NEW), greedy(NEW)).run(ahead)
        assert [o and o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
        later = load(greedy(NEW)).run(ahead)
        assert later[0] is not None
        assert len(tokens_of(later[0])) == NEW

    def test_the_watchdog_sees_steps_begin_and_end(self, ahead: LLM) -> None:
        counters, executable = worker_of(ahead)._counters, runner_of(ahead)._store.executable
        run, busy = executable.run, []

        def watched_run(*args: Any) -> tuple[Tensor, ...]:
            busy.append(counters[Counter.BUSY_SINCE])
            return run(*args)

        with _replaced(executable, run=watched_run):
            load(greedy(NEW)).run(ahead)
        assert all(busy)
        assert len(set(busy)) == NEW
        assert counters[Counter.BUSY_SINCE] == 0


@contextmanager
def _replaced(target: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
