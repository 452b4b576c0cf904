# SPDX-License-Identifier: Apache-2.0
"""The thread that steps run on: order, and when an answer is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from rbln_vllm.executor.step_thread import StepThread

WAIT_S = 60


@pytest.fixture
def steps() -> Iterator[StepThread]:
    thread = StepThread("steps-under-test")
    yield thread
    thread.stop()


class Gate:
    """A call that says when it has begun and ends when it may."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.begun, self.may_end, self._then = threading.Event(), threading.Event(), then

    def __call__(self) -> object:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        return self._then()


def test_calls_run_in_the_order_they_were_made_on_one_thread(steps: StepThread) -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    futures = [steps.submit(partial(note, number)) for number in range(50)]
    futures[-1].result(WAIT_S)
    assert [number for number, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_an_answer_comes_at_once_when_no_call_waits(steps: StepThread) -> None:
    assert steps.submit(lambda: 3).result(WAIT_S) == 3


def test_an_answer_is_kept_until_the_next_call_launches(steps: StepThread) -> None:
    first, launch, second = Gate(lambda: 1), Gate(), Gate(lambda: 2)

    def next_step() -> object:
        launch()
        steps.launched()
        return second()

    answers = [steps.submit(first), steps.submit(next_step)]
    first.may_end.set()
    assert launch.begun.wait(WAIT_S)  # the first is over, the second prepares its program
    assert not answers[0].done()
    launch.may_end.set()
    assert answers[0].result(WAIT_S) == 1  # given although the second still runs
    assert not answers[1].done()
    second.may_end.set()
    assert answers[1].result(WAIT_S) == 2


def test_a_kept_answer_is_given_at_the_latest_when_the_next_call_ends(steps: StepThread) -> None:
    first = Gate(lambda: 1)
    answers = [steps.submit(first), steps.submit(lambda: 2), steps.submit(lambda: 3)]
    first.may_end.set()
    assert [answer.result(WAIT_S) for answer in answers] == [1, 2, 3]


def test_an_error_is_given_at_once(steps: StepThread) -> None:
    def fail() -> None:
        raise OSError("no such device")

    first, second = Gate(fail), Gate()
    failed, _ = steps.submit(first), steps.submit(second)
    first.may_end.set()
    with pytest.raises(OSError, match="no such device"):
        failed.result(WAIT_S)
    second.may_end.set()


def test_the_thread_outlives_an_error(steps: StepThread) -> None:
    with pytest.raises(ZeroDivisionError):
        steps.call(lambda: 1 // 0)
    assert steps.call(lambda: 5) == 5


def test_a_call_from_the_thread_itself_does_not_wait_for_itself(steps: StepThread) -> None:
    assert steps.call(lambda: steps.call(lambda: 7)) == 7


def test_stopping_drops_the_calls_that_have_not_begun() -> None:
    steps = StepThread("steps-under-test")
    running = Gate(lambda: 1)
    answers = [steps.submit(running), steps.submit(lambda: 2)]
    assert running.begun.wait(WAIT_S)
    stopping = threading.Thread(target=steps.stop)
    stopping.start()
    while not steps.stopped:
        pass
    running.may_end.set()
    stopping.join(WAIT_S)
    assert answers[0].result(WAIT_S) == 1
    assert answers[1].cancelled()
    steps.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        steps.submit(lambda: 3)
