# SPDX-License-Identifier: Apache-2.0
"""A grammar that takes too long ends its own request and holds up no other."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.core.grammar_compiles import CompileThreads, limit_compile_time

PATIENCE = 60.0
"""Seconds after which something hangs."""


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What endless compiles wait for: set at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def begins(threads: CompileThreads) -> bool:
    """Whether a call finds a place, however long it then takes."""
    begun = threading.Event()
    threads.submit(begun.set)
    return begun.wait(PATIENCE)


def test_results_and_errors_come_through() -> None:
    threads = CompileThreads()
    assert threads.submit(lambda a, b: a + b, 1, 2).result(PATIENCE) == 3
    error = threads.submit(lambda: int("x")).exception(PATIENCE)
    assert isinstance(error, ValueError)


def test_one_that_takes_too_long_fails_and_gives_its_place_up(released: threading.Event) -> None:
    threads = CompileThreads(seconds=0.02, threads=1)
    endless = threads.submit(released.wait)
    assert begins(threads)
    with pytest.raises(TimeoutError, match="not compiled within 0 s; make it smaller"):
        endless.result(PATIENCE)


def test_what_ends_after_its_time_changes_nothing(released: threading.Event) -> None:
    threads = CompileThreads(seconds=0.01, threads=1)
    done = threading.Event()

    def late() -> str:
        released.wait()
        done.set()
        return "late"

    future = threads.submit(late)
    assert isinstance(future.exception(PATIENCE), TimeoutError)
    released.set()
    assert done.wait(PATIENCE)
    assert isinstance(future.exception(), TimeoutError)
    assert all(begins(threads) for _ in range(3))


def test_no_more_run_at_once_than_there_are_places(released: threading.Event) -> None:
    threads = CompileThreads(threads=2)
    running = threading.Semaphore(0)

    def work() -> None:
        running.release()
        released.wait()

    futures = [threads.submit(work) for _ in range(4)]
    assert all(running.acquire(timeout=PATIENCE) for _ in range(2))
    assert not running.acquire(timeout=0.05)
    released.set()
    for future in futures:
        future.result(PATIENCE)


def test_time_in_the_queue_does_not_count() -> None:
    threads, begun = CompileThreads(seconds=0.02, threads=1), threading.Event()
    with threads._places:  # as while a grammar compiles
        queued = threads.submit(begun.set)
        time.sleep(0.1)
        assert not queued.done()
    assert begun.wait(PATIENCE)


def test_after_a_shutdown_nothing_begins(released: threading.Event) -> None:
    threads = CompileThreads(threads=1)
    started = threading.Event()

    def wait_for_release() -> None:
        started.set()
        released.wait()

    threads.submit(wait_for_release)
    assert started.wait(PATIENCE)
    waiting = threads.submit(int, "3")
    threads.shutdown(wait=True, cancel_futures=True)
    released.set()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)


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
