# SPDX-License-Identifier: Apache-2.0
"""A process that forks one for each check: a check that never ends can be ended from outside.

Compilers of grammars are native code in threads, which nothing can interrupt; a process can be. The
one that forks is forked itself, before the process it serves has threads. It loads what every check
needs when the first one comes, and runs nothing else.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.utils.system_utils import set_process_title

logger = init_logger(f"vllm.{__name__}")

Check = Callable[[bytes], str]
"""What is wrong with what it is given, in words; nothing when all is well."""
PASSED, REFUSED = b"+", b"-"
GIB = 1 << 30
MEMORY_BYTES = 2 * GIB
"""Most that a check may take beside what it shares with the process it was forked from."""
NAME = "GrammarChecks"
_NICENESS = 5  # steps of the engine come first
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Runs checks, each in a process of its own, for at most ``seconds`` and in ``MEMORY_BYTES``.

    ``make_check`` is called in the process that forks, at the first check; with ``may_fork`` False
    that process is spawned, so that it must be picklable.
    """

    def __init__(
        self, make_check: Callable[[], Check], seconds: float, *, may_fork: bool = True
    ) -> None:
        context: Any = multiprocessing.get_context("fork" if may_fork else "spawn")
        self._orders, theirs = socket.socketpair()
        arguments = (theirs, self._orders, make_check, seconds)
        self._process = context.Process(target=_serve, args=arguments, name=NAME, daemon=True)
        self._process.start()
        theirs.close()

    def open(self) -> socket.socket:
        """Begin a check. Write what is to be checked, shut that direction down, read the verdict:
        ``PASSED``, ``REFUSED`` and a reason, or nothing where the check had to be ended.

        Raises OSError when the server is gone.
        """
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._orders, [b"."], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        """End the server; checks under way end by themselves."""
        self._orders.close()
        self._process.terminate()
        self._process.join()


def _serve(
    orders: socket.socket, other_end: socket.socket, make_check: Callable[[], Check], seconds: float
) -> None:
    other_end.close()
    _stand_alone()
    _let_go_of_addresses()
    check: Check | None = None
    while True:
        message, (*handles,), _, _ = socket.recv_fds(orders, 1, 1)
        if not message:
            return
        with socket.socket(fileno=handles[0]) as asker:
            if check is None:
                check = _made(make_check)
            if os.fork() == 0:
                _answer(asker, check, seconds)


def _stand_alone() -> None:
    """Of the process it was forked from nothing is left to do: end with it, and at its word."""
    set_process_title(NAME)
    signal.set_wakeup_fd(-1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for checks


def _let_go_of_addresses() -> None:
    """A server's socket was inherited: its port must be free as soon as the server is gone.

    Nothing else may get the socket's number, which objects of the server still hold.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if _has_address(number):
            os.dup2(nothing, number)
    os.close(nothing)


def _has_address(number: int) -> bool:
    """Whether it is a socket bound to a port or to a path; no others have names."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
    except OSError:  # what the numbers were listed with
        return False
    with socket.socket(fileno=os.dup(number)) as copy:
        return bool(copy.getsockname())


def _made(make_check: Callable[[], Check]) -> Check:
    """A check; where none can be made, one that lets everything pass."""
    try:
        return make_check()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning("grammars are not checked before the engine has them: %s", error)
        return lambda _given: ""


def _answer(asker: socket.socket, check: Check, seconds: float) -> None:
    """Run one check in this process, which ends with it."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        given = _read(asker)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        os.nice(_NICENESS)
        _limit_memory()
        reason = check(given)
        asker.sendall(REFUSED + reason.encode() if reason else PASSED)
        status = 0
    finally:
        os._exit(status)  # not through what the parent registered for its own end


def _read(asker: socket.socket) -> bytes:
    parts = []
    while part := asker.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _limit_memory() -> None:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData:")
    ]
    most = int(line.split()[1]) * 1024 + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
