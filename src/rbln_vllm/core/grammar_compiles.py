# SPDX-License-Identifier: Apache-2.0
"""A time limit on compiling grammars: one that takes minutes ends its request and no other.

vLLM compiles in a small pool of threads and waits for ever. A choice of some thousand long strings
keeps a thread for minutes, and with it all structured requests that come later.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from vllm.v1.structured_output import StructuredOutputManager

T = TypeVar("T")

COMPILE_SECONDS = 30.0
"""Longest that a grammar may take, its time in the queue not counted."""
THREADS = 2


class CompileThreads:
    """Takes the place of the pool that grammars are compiled in.

    A call that is not done after ``seconds`` fails with TimeoutError and gives up its place to the
    next; its thread, which cannot be ended, is left to itself and does not hold up an exit.
    """

    def __init__(self, seconds: float = COMPILE_SECONDS, threads: int = THREADS) -> None:
        self._seconds = seconds
        self._places = threading.Semaphore(threads)
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """The result of ``call(*args)``, or TimeoutError."""
        future: Future[T] = Future()
        work = threading.Thread(
            target=self._run, args=(future, call, args), name="grammar", daemon=True
        )
        work.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No call that waits for a place begins any more."""
        self._closed = True

    def _run(self, future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._places.acquire()
        place = _Once(self._places.release)
        timer = threading.Timer(self._seconds, self._expire, (future, place))
        timer.daemon = True
        if self._closed:
            place()
            future.cancel()
            return
        timer.start()
        try:
            result = call(*args)
        except Exception as error:  # whatever a backend raises is the request's, not the thread's
            _settle(future.set_exception, error)
        else:
            _settle(future.set_result, result)
        finally:
            timer.cancel()
            place()

    def _expire(self, future: Future[Any], place: "_Once") -> None:
        place()
        message = (
            f"the grammar was not compiled within {self._seconds:.0f} s; make it smaller: fewer "
            "or shorter alternatives, lower bounds of repetition"
        )
        _settle(future.set_exception, TimeoutError(message))


class _Once:
    """Calls a function at the first of several calls."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._lock, self._done = function, threading.Lock(), False

    def __call__(self) -> None:
        with self._lock:
            first, self._done = not self._done, True
        if first:
            self._function()


def _settle(setter: Callable[[Any], None], value: Any) -> None:
    """Set a future that may have been set by the other side already."""
    with suppress(InvalidStateError):
        setter(value)


def limit_compile_time(manager: StructuredOutputManager) -> None:
    """Have a manager, in which nothing is compiled yet, compile within the time limit."""
    if hasattr(manager, "executor"):  # not without a tokenizer
        manager.executor.shutdown(wait=False)
        manager.executor = CompileThreads()
