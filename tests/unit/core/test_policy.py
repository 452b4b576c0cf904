# SPDX-License-Identifier: Apache-2.0
"""The pure parts: whose turn, what a step is, what fits the pool."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from rbln_vllm.config import RBLNConfig
from rbln_vllm.core.limits import blocks_for, check_fits, max_request_tokens, prompt_refusal
from rbln_vllm.core.scheduler import prefill_run_limit
from rbln_vllm.core.step import (
    EMPTY_STEP,
    StepKind,
    StepPlan,
    StepRuleError,
    classify,
    whole_prompts,
)
from rbln_vllm.core.turns import Runnable, Turn, TurnPolicy
from rbln_vllm.devices import HOST

C = 8


@pytest.mark.parametrize(
    ("limit", "prefill", "decode", "run", "turn"),
    [
        (0, False, False, 0, Turn.IDLE),
        (0, True, False, 9, Turn.PREFILL),
        (0, False, True, 0, Turn.DECODE),
        (0, True, True, 99, Turn.PREFILL),
        (1, True, True, 0, Turn.PREFILL),
        (1, True, True, 1, Turn.DECODE),
        (1, True, False, 1, Turn.PREFILL),
        (2, True, True, 1, Turn.PREFILL),
        (2, True, True, 2, Turn.DECODE),
        (2, False, False, 2, Turn.IDLE),
    ],
)
def test_turn(limit: int, prefill: bool, decode: bool, run: int, turn: Turn) -> None:
    assert TurnPolicy(limit).choose(Runnable(prefill, decode), run) is turn


def test_only_prefills_that_made_decodes_wait_count() -> None:
    policy = TurnPolicy(2)
    assert policy.count(Turn.PREFILL, True, 1) == 2
    assert policy.count(Turn.PREFILL, False, 1) == 0
    assert policy.count(Turn.DECODE, True, 2) == 0
    assert policy.count(Turn.IDLE, True, 2) == 2


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_prefill_run"):
        TurnPolicy(-1)


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_ready_decodes_wait_for_at_most_n_prefills(
    limit: int, steps: list[tuple[bool, bool]]
) -> None:
    policy, run, waited = TurnPolicy(limit), 0, 0
    for prefill, decode in steps:
        turn = policy.choose(Runnable(prefill, decode), run)
        run = policy.count(turn, decode, run)
        waited = waited + 1 if turn is Turn.PREFILL and decode else 0
        assert waited <= limit
        assert (turn is Turn.IDLE) == (not prefill and not decode)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 0),
        ({"max_prefill_run": 3}, 3),
        (RBLNConfig(max_prefill_run=5), 5),
        (RBLNConfig(max_prefill_run=0), 0),
        (RBLNConfig(), HOST.default_max_prefill_run),
    ],
)
def test_prefill_run_limit_of_a_mapping_or_the_options(options: object, limit: int) -> None:
    assert prefill_run_limit(SimpleNamespace(additional_config=options)) == limit


def output_of(
    new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]], drafts: int = 0
) -> SchedulerOutput:
    """Builds an output from request id to (computed tokens, scheduled tokens)."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(r, [0] * 99, [], None, None, ([1],), start, None)
        for r, (start, _) in new.items()
    ]
    ids, starts = list(cached), [start for start, _ in cached.values()]
    output.scheduled_cached_reqs = CachedRequestData(
        ids, set(), [], {}, [None] * len(ids), starts, [0] * len(ids)
    )
    output.num_scheduled_tokens = {r: n for r, (_, n) in {**new, **cached}.items()}
    output.scheduled_spec_decode_tokens = {r: [1] * drafts for r in cached if drafts}
    return output


@pytest.mark.parametrize(
    ("new", "cached", "kind"),
    [
        ({}, {}, StepKind.EMPTY),
        ({"a": (0, C)}, {}, StepKind.PREFILL),
        ({"a": (3, C - 3)}, {}, StepKind.PREFILL),
        ({}, {"a": (C, 2)}, StepKind.PREFILL),
        ({}, {"a": (C, 1)}, StepKind.DECODE),
        ({"a": (0, 1)}, {}, StepKind.DECODE),
        ({}, {"a": (5, 1), "b": (40, 1)}, StepKind.DECODE),
    ],
)
def test_classify(
    new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]], kind: StepKind
) -> None:
    plan = classify(output_of(new, cached), C)
    assert plan.kind is kind
    assert plan.request_ids == (*new, *cached)


def test_rows_with_drafts_are_decode_rows() -> None:
    plan = classify(output_of({}, {"a": (7, 4), "b": (20, 4)}, drafts=3), C)
    assert (plan.kind, plan.tokens) == (StepKind.DECODE, (4, 4))


@pytest.mark.parametrize(
    ("new", "cached"),
    [
        ({"a": (0, C)}, {"b": (9, 1)}),
        ({"a": (0, 4), "b": (0, 4)}, {}),
        ({"a": (0, C + 1)}, {}),
        ({"a": (4, C)}, {}),
    ],
)
def test_what_no_program_runs_is_an_error(
    new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]
) -> None:
    with pytest.raises(StepRuleError):
        classify(output_of(new, cached), C)


def test_an_encoder_computes_whole_prompts() -> None:
    """Also those of requests that were preempted and begin again."""
    plan = whole_prompts(output_of({"a": (0, 7)}, {"b": (0, 1)}))
    assert plan == StepPlan(StepKind.ENCODE, ("a", "b"), (7, 1))
    assert whole_prompts(output_of({}, {})) == EMPTY_STEP


@pytest.mark.parametrize(("new", "cached"), [({"a": (4, 7)}, {}), ({"a": (0, 7)}, {"b": (1, 9)})])
def test_an_encoder_does_not_compute_the_rest_of_a_prompt(
    new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]
) -> None:
    with pytest.raises(StepRuleError, match="whole prompts"):
        whole_prompts(output_of(new, cached))


@pytest.mark.parametrize(
    ("kind", "ids", "tokens"),
    [
        (StepKind.EMPTY, ("a",), (1,)),
        (StepKind.DECODE, (), ()),
        (StepKind.DECODE, ("a",), (0,)),
        (StepKind.DECODE, ("a", "b"), (1,)),
    ],
)
def test_plans_check_themselves(
    kind: StepKind, ids: tuple[str, ...], tokens: tuple[int, ...]
) -> None:
    assert EMPTY_STEP.kind is StepKind.EMPTY
    with pytest.raises(StepRuleError):
        StepPlan(kind, ids, tokens)


def test_pool_limits_leave_out_the_padding_block() -> None:
    assert max_request_tokens(13, 8192) == 98304
    assert max_request_tokens(1, 4) == 0
    assert blocks_for(98304, 8192) == 13
    assert blocks_for(98305, 8192) == 14
    with pytest.raises(ValueError, match="at least 1 block"):
        max_request_tokens(0, 4)


def test_check_fits_says_what_would_fit() -> None:
    check_fits(98304, 13, 8192)
    with pytest.raises(ValueError, match=r"98305 does not fit .* fits is 98304.* 14 blocks"):
        check_fits(98305, 13, 8192)


@pytest.mark.parametrize(("tokens", "refused"), [(47, False), (48, False), (49, True)])
def test_prompt_refusal_states_the_limit(tokens: int, refused: bool) -> None:
    reason = prompt_refusal(tokens, 48)
    assert (reason is not None) is refused
    assert reason is None or ("49" in reason and "48" in reason)
