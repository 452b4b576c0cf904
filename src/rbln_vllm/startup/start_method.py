# SPDX-License-Identifier: Apache-2.0
"""Whether engine processes are forked from this one, which saves them 6 s of imports.

Upstream spawns them on a CPU, because OpenMP's threads do not survive a fork: the child's next
parallel region waits for them for ever. Here they are released before it.
"""

import ctypes
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import ForkProcess

from rbln_vllm import envs

_OMP_PAUSE_SOFT = 1


def engines_may_fork() -> bool:
    """Whether a child forked now runs like one that was spawned.

    Not while other Python threads may hold a lock that the child then never gets, and not for
    the reference executor, whose OpenMP threads must have read `OMP_WAIT_POLICY` at their start.
    """
    alone = _python_threads() == 1 and threading.current_thread() is threading.main_thread()
    return (
        sys.platform == "linux"
        and alone
        and envs.host_executor() == "native"
        and _openmp_release() is not None
    )


def _python_threads() -> int:
    """All that run Python, also those that `threading` does not know (`_thread`, C callbacks)."""
    return len(sys._current_frames())


def is_forked() -> bool:
    """Whether this process was forked: its OpenMP read the environment before we could set it."""
    return isinstance(multiprocessing.current_process(), ForkProcess)


@functools.cache
def release_openmp_before_forks() -> None:
    """Let every later fork of this process end its OpenMP threads; the next region starts new ones.

    Python keeps such a hook for good, so it is installed once.
    """
    release = _openmp_release()
    if release is not None:
        os.register_at_fork(before=release)


def _openmp_release() -> Callable[[], None] | None:
    """OpenMP 5's `omp_pause_resource_all`; None where torch has an OpenMP without it, or none.

    It covers the threads of the calling thread's regions, and that thread is all a child has.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return None if pause is None else functools.partial(pause, _OMP_PAUSE_SOFT)
