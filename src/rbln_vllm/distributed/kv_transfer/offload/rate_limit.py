# SPDX-License-Identifier: Apache-2.0
"""Says the same kind of thing at most every so often."""

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Lets one event pass per ``seconds`` and counts those it holds back. For any thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next = -float("inf")
        self._held_back = 0
        self._lock = threading.Lock()

    def passes(self) -> int | None:
        """None to stay silent, else how many events were held back since the last that passed."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._held_back += 1
                return None
            self._next = now + self._seconds
            held_back, self._held_back = self._held_back, 0
            return held_back
