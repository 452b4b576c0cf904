# SPDX-License-Identifier: Apache-2.0
"""A process whose engine failed at start must end, though LMCache's loop runs in it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, threading
from rbln_vllm.distributed.kv_transfer.lmcache.ending import stop_with_main_thread
loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever)
thread.start()
{call}
raise SystemExit(3)
"""


def test_the_process_ends() -> None:
    program = PROGRAM.format(call="stop_with_main_thread(loop)")
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 3


def test_a_loop_that_was_closed_is_left_alone() -> None:
    call = "stop_with_main_thread(loop); loop.call_soon_threadsafe(loop.stop)"
    program = PROGRAM.format(call=f"{call}; thread.join(); loop.close()")
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
