# SPDX-License-Identifier: Apache-2.0
"""A thread that makes calls in order and gives each answer at the moment that suits the device."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True)
class _Answer:
    """What a call came to, and who waits for it."""

    future: Future[Any]
    value: Any = None
    error: BaseException | None = None

    def give(self) -> None:
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class StepThread:
    """Makes calls one after another, in the order in which they were submitted.

    When another call is already waiting, the answer of the one before is kept until that one says
    :meth:`launched`, or ends: whoever waits for it then wakes while a program runs without the
    interpreter's lock. Given at once, it would compete for that lock with the preparation of the
    next program, and the device would wait for both. An error is given at once.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._kept: _Answer | None = None
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Raises RuntimeError after :meth:`stop`."""
        if self.stopped:
            raise RuntimeError("the step thread has been stopped")
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def call(self, call: Callable[[], Any]) -> Any:
        """Submit and wait; on the thread itself, call at once."""
        if threading.current_thread() is self._thread:
            return call()
        return self.submit(call).result()

    def launched(self) -> None:
        """From within a call: its program starts now, so give the answer of the call before."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.give()

    def stop(self) -> None:
        """Drop the calls that have not begun and wait for the one that has; repeatable."""
        self.stopped = True
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if self.stopped or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            answer = _outcome(future, call)
            self.launched()
            self._kept = answer
            if answer.error is not None or self._calls.empty():
                self.launched()
        self.launched()


def _outcome(future: Future[Any], call: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(future, call())
    except BaseException as error:  # the waiting thread raises it, whatever it is
        return _Answer(future, error=error)
