# SPDX-License-Identifier: Apache-2.0
"""A grammar that takes too long ends its own request and holds up no other."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.core.grammar_compiles import CompileThreads, limit_compile_time


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What endless compiles wait for: set at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_errors_come_through() -> None:
    threads = CompileThreads()
    assert threads.submit(lambda a, b: a + b, 1, 2).result(5) == 3
    error = threads.submit(lambda: int("x")).exception(5)
    assert isinstance(error, ValueError)


def test_one_that_takes_too_long_fails_and_gives_its_place_up(released: threading.Event) -> None:
    threads = CompileThreads(seconds=0.02, threads=1)
    endless = threads.submit(released.wait)
    later = threads.submit(lambda: "compiled")
    with pytest.raises(TimeoutError, match="not compiled within 0 s; make it smaller"):
        endless.result(5)
    assert later.result(5) == "compiled"


def test_what_ends_after_its_time_changes_nothing(released: threading.Event) -> None:
    threads = CompileThreads(seconds=0.01, threads=1)
    done = threading.Event()

    def late() -> str:
        released.wait()
        done.set()
        return "late"

    future = threads.submit(late)
    assert isinstance(future.exception(5), TimeoutError)
    released.set()
    assert done.wait(5)
    assert isinstance(future.exception(), TimeoutError)
    assert [threads.submit(int, "7").result(5) for _ in range(3)] == [7] * 3


def test_no_more_run_at_once_than_there_are_places(released: threading.Event) -> None:
    threads = CompileThreads(threads=2)
    running = threading.Semaphore(0)

    def work() -> None:
        running.release()
        released.wait()

    futures = [threads.submit(work) for _ in range(4)]
    assert all(running.acquire(timeout=5) for _ in range(2))
    assert not running.acquire(timeout=0.05)
    released.set()
    for future in futures:
        future.result(5)


def test_time_in_the_queue_does_not_count(released: threading.Event) -> None:
    threads = CompileThreads(seconds=0.2, threads=1)
    first = threads.submit(released.wait)
    assert isinstance(first.exception(5), TimeoutError)
    second, third = threads.submit(threading.Event().wait, 0.12), threads.submit(int, "3")
    assert second.result(5) is False
    assert third.result(5) == 3


def test_after_a_shutdown_nothing_begins(released: threading.Event) -> None:
    threads = CompileThreads(threads=1)
    started = threading.Event()

    def wait_for_release() -> None:
        started.set()
        released.wait()

    threads.submit(wait_for_release)
    assert started.wait(5)
    waiting = threads.submit(int, "3")
    threads.shutdown(wait=True, cancel_futures=True)
    released.set()
    with pytest.raises(CancelledError):
        waiting.result(5)


def test_the_managers_pool_is_replaced() -> None:
    closed: list[bool] = []
    old = SimpleNamespace(shutdown=lambda *, wait: closed.append(wait))
    manager: Any = SimpleNamespace(executor=old)
    limit_compile_time(manager)
    assert isinstance(manager.executor, CompileThreads)
    assert closed == [False]


def test_a_manager_without_a_tokenizer_compiles_nothing() -> None:
    manager: Any = SimpleNamespace()
    limit_compile_time(manager)
    assert not hasattr(manager, "executor")
