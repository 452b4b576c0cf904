# SPDX-License-Identifier: Apache-2.0
"""An event loop that does not keep its process."""

import threading
from asyncio import AbstractEventLoop


def stop_with_main_thread(loop: AbstractEventLoop) -> None:
    """Stop ``loop`` when the main thread has ended.

    LMCache's loop runs in a thread that Python waits for, so that an engine that fails at start
    after LMCache is up would stay as a process that does nothing.
    """

    def wait() -> None:
        threading.main_thread().join()
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)

    threading.Thread(target=wait, name="rbln-lmcache-end", daemon=True).start()
