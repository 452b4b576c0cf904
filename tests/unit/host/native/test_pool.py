# SPDX-License-Identifier: Apache-2.0
"""The thread pool: no task is lost, run twice or waited for in vain."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_host import _native
from tests.unit.host.native.programs import CPUS, Loaded, Op, blank

PATIENCE = 60.0
"""Seconds after which something hangs: all of it takes less than a tenth of that."""
SIZES = (1, 2, 3, 60, 1, 128)
"""Tasks of the commands of a program, which have next to nothing to do."""

each_spin = pytest.mark.parametrize("spin_us", [0, 20])
each_size = pytest.mark.parametrize("threads", [1, 2, 3, 8])


def cpus(count: int) -> list[int]:
    """CPUs for that many threads, over again where there are not so many."""
    return [CPUS[i % len(CPUS)] for i in range(count)]


def finish(*functions: Callable[[], None]) -> None:
    """Call them at once, each in a thread. Fails when one does not return, which in native code
    nothing else could end."""
    results: list[Future[None]] = [Future() for _ in functions]

    def call(function: Callable[[], None], result: Future[None]) -> None:
        try:
            function()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    for function, result in zip(functions, results, strict=True):
        threading.Thread(target=call, args=(function, result), daemon=True).start()
    for result in results:
        result.result(timeout=PATIENCE)


class Counting:
    """A program of many small commands that counts how often each of its tasks ran."""

    def __init__(self, commands: int = 120, isa: str = "portable") -> None:
        self.values = torch.zeros(128, 4)
        self.values[:, 2] = 1
        self.counter = torch.zeros(1)
        self.largest = [blank((size,), torch.int64) for size in SIZES]
        self.commands = commands
        ops = []
        for i in range(commands):
            size = SIZES[i % len(SIZES)]
            out = self.largest[i % len(SIZES)]
            ops.append(Op("argmax", [self.values[:size], out]))
            ops.append(Op("elementwise", [self.counter, self.counter], text="i0 c1.0 add"))
        self.program = Loaded(ops, isa)
        self.around = [self._around(out).clone() for out in self.largest]

    def check_run(self, pool: _native.Pool) -> None:
        """Every command ran once and whole, and no task that does not exist."""
        self.counter.zero_()
        for out in self.largest:
            out.fill_(-1)
        self.program.run(pool)
        assert self.counter.item() == self.commands
        for out, around in zip(self.largest, self.around, strict=True):
            assert (out == 2).all()
            assert torch.equal(self._around(out), around)

    @staticmethod
    def _around(out: Tensor) -> Tensor:
        whole = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
        start = out.storage_offset()
        return torch.cat((whole[:start], whole[start + len(out) :]))


@each_spin
@each_size
def test_many_tiny_tasks(spin_us: int, threads: int) -> None:
    """A lost wake-up, a task taken of the wrong command or counted twice: all show here."""
    counting, pool = Counting(), _native.Pool(cpus(threads), spin_us)
    assert pool.threads == threads

    def runs() -> None:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            counting.check_run(pool)

    finish(runs)


@each_spin
def test_sleeping_threads_are_woken(spin_us: int) -> None:
    """The caller could do everything itself, so it is not the results that show it."""
    before = workers()
    pool = _native.Pool(cpus(2), spin_us)
    (worker,) = new_workers(before, 1)
    tensor = torch.ones(64, 16384)
    program = Loaded([Op("elementwise", [tensor, tensor], text="i0 tanh exp")], "portable")

    def runs() -> None:
        for _ in range(5):
            start = nanoseconds(worker)
            while nanoseconds(worker) < start + 2_000_000:
                time.sleep(0.002)
                program.run(pool)

    finish(runs)


def workers() -> set[int]:
    """Thread ids of this process's pools."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            if (task / "comm").read_text() == "rbln-worker\n":
                found.add(int(task.name))
    return found


def new_workers(before: set[int], count: int) -> list[int]:
    """Once that many have started, which is when they name themselves."""
    wait_until(lambda: len(workers() - before) == count)
    return sorted(workers() - before)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.001)


def nanoseconds(thread: int) -> int:
    """Time a thread has run."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The CPUs of this thread, put back afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_threads_stay_on_their_cpus(allowed: set[int]) -> None:
    before = workers()
    pool = _native.Pool([CPUS[0], CPUS[-1], CPUS[0]])
    Counting().check_run(pool)
    threads = new_workers(before, 2)
    wait_until(lambda: all(len(os.sched_getaffinity(thread)) == 1 for thread in threads))
    where = [os.sched_getaffinity(thread) for thread in threads]
    assert where == [{CPUS[-1]}, {CPUS[0]}]
    assert os.sched_getaffinity(0) == allowed
    os.sched_setaffinity(0, {CPUS[-1]})
    Counting().check_run(pool)
    assert os.sched_getaffinity(0) == {CPUS[-1]}


def test_a_cpu_that_does_not_exist() -> None:
    """Its thread runs where the system likes."""
    for missing in (-1, 1023, 1 << 20):
        Counting().check_run(_native.Pool([CPUS[0], missing, missing]))


@each_spin
def test_two_pools_on_the_same_cpus(spin_us: int) -> None:
    def runs(counting: Counting, pool: _native.Pool) -> None:
        for _ in range(150):
            counting.check_run(pool)

    pairs = [(Counting(), _native.Pool(cpus(2), spin_us)) for _ in range(2)]
    finish(*[partial(runs, *pair) for pair in pairs])


@each_spin
def test_callers_of_one_pool_take_turns(spin_us: int) -> None:
    pool = _native.Pool(cpus(2), spin_us)

    def runs() -> None:
        counting = Counting()
        for _ in range(60):
            counting.check_run(pool)

    finish(*[runs] * 4)


def test_one_program_on_two_pools() -> None:
    """Its commands are not changed by a run. Both write the same."""
    values, out = torch.randn(64, 1000), torch.zeros(64, dtype=torch.int64)
    program = Loaded([Op("argmax", [values, out])], "portable")
    pools = [_native.Pool(cpus(2)) for _ in range(2)]

    def runs(pool: _native.Pool) -> None:
        for _ in range(100):
            program.run(pool)

    finish(*[partial(runs, pool) for pool in pools])
    assert torch.equal(out, values.argmax(dim=-1))


@each_spin
@each_size
def test_pools_end(spin_us: int, threads: int) -> None:
    """Unused, just after a run, and asleep; their threads are gone then."""
    before, counting = workers(), Counting(6)

    def cycles() -> None:
        for cycle in range(30):
            pool = _native.Pool(cpus(threads), spin_us)
            if cycle % 3:
                counting.check_run(pool)
            if cycle % 3 == 2:
                time.sleep(0.002)
            del pool

    finish(cycles)
    gc.collect()
    wait_until(lambda: not workers() - before)


@pytest.mark.parametrize("rows", [0, 3])
def test_commands_without_tasks(rows: int) -> None:
    """Nothing is to be done for some, for the first, the last, or all: their outputs are empty, or
    a run has no tokens."""
    nothing = Op("copy", [torch.empty(rows, 3), torch.empty(rows, 3)], by_token=True)
    pool = _native.Pool(cpus(2))
    for pattern in ((0,), (1,), (0, 1), (1, 0), (0, 1, 0), (0, 0), (1, 0, 0, 1)):
        counter = torch.zeros(1)
        add = Op("elementwise", [counter, counter], text="i0 c1.0 add")
        program = Loaded([add if something else nothing for something in pattern], "portable")
        finish(lambda program=program: program.run(pool, 0))  # type: ignore[misc]
        assert counter.item() == sum(pattern)


def test_more_runs_than_a_run_number_counts() -> None:
    """It has 16 bits."""
    counter = torch.zeros(1, dtype=torch.float32)
    add = Op("elementwise", [counter, counter], text="i0 c1.0 add")
    program, pool = Loaded([add], "portable"), _native.Pool([CPUS[0]])
    total = (1 << 16) + 5

    def runs() -> None:
        for _ in range(total):
            program.run(pool)

    finish(runs)
    assert counter.item() == total


def in_child(function: Callable[[], None]) -> int:
    """Exit status of a fork that calls the function; -1 when it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_makes_its_own_pool() -> None:
    """The parent's idle pool has no threads there; a run on it is the caller's work alone, and
    dropping it does not wait for them."""
    held = [_native.Pool(cpus(3))]
    counting = Counting()
    counting.check_run(held[0])

    def child() -> None:
        own = _native.Pool(cpus(2))
        for _ in range(50):
            counting.check_run(own)
        counting.check_run(held[0])
        held.clear()
        del own
        counting.check_run(_native.Pool(cpus(2)))

    assert in_child(child) == 0
    counting.check_run(held[0])
