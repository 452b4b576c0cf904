# SPDX-License-Identifier: Apache-2.0
"""Background threads that yield to the programs, which want every core."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

STORE_NICENESS = 10
"""Nobody waits for a store, except for a block that is about to be used again."""


def background_executor(name: str, threads: int = 1, niceness: int = 0) -> ThreadPoolExecutor:
    """Threads that are ``niceness`` below the process in priority, where the system allows it."""
    return ThreadPoolExecutor(threads, name, _lower_priority, (niceness,))


def _lower_priority(niceness: int) -> None:
    if niceness and hasattr(os, "setpriority"):
        thread = threading.get_native_id()  # Linux: priorities belong to threads
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, own + niceness))
