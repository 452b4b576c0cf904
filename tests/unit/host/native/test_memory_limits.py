# SPDX-License-Identifier: Apache-2.0
"""Without memory or threads there is an error, and smaller work goes on."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's memory cannot be limited"
)

LIMIT = """
import os
import resource
from rbln_host import _native
import numpy as np

def limit(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

def operand(base, array):
    strides = [stride // array.itemsize for stride in array.strides]
    return _native.Tensor(base, 0, str(array.dtype), list(array.shape), strides)

def program(*calls):
    bases, commands = [], []
    for op, arrays, numbers in calls:
        operands = [a if a is None else operand(len(bases) + i, a) for i, a in enumerate(arrays)]
        commands.append(_native.Command(op, operands, numbers, ""))
        bases += arrays
    sizes = [0 if a is None else a.nbytes for a in bases]
    loaded = _native.Program(commands, sizes, "portable")
    for i, a in enumerate(bases):
        if a is not None:
            loaded.bind(i, a.ctypes.data, a.nbytes)
    return loaded

def cpus(count):
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[i % len(allowed)] for i in range(count)]

source, target = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
copy = program(("copy", [source, target], {}))
"""


def succeeds(script: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LIMIT + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plan_that_is_too_large(threads: int) -> None:
    """Attention to 2^30 positions from each of 8 sequences, planned by any thread of the pool after
    another command. The next program runs nevertheless."""
    succeeds(f"""
    kv = np.zeros((1, 1, 1 << 16, 32), np.float32)
    table = np.zeros((8, 1 << 14), np.int32)
    positions = np.full(8, (1 << 30) - 1, np.int32)
    query, out = np.zeros((8, 1, 16), np.float32), np.zeros((8, 1, 16), np.float32)
    numbers = {{"scale": 1.0, "window": 0.0, "soft_cap": 0.0}}
    tensors = [query, kv, table, positions, None, None, out]
    wide = [np.ones((64, 16384), np.float32) for _ in range(2)]
    attention = program(("copy", wide, {{}}), ("paged_attention", tensors, numbers))
    pool = _native.Pool(cpus({threads}))
    limit(200)
    for _ in range(30):
        try:
            attention.run(pool)
        except MemoryError:
            pass
        else:
            raise AssertionError("it found the memory")
    copy.run(pool)
    assert target.all()
    """)


def test_more_threads_than_the_system_gives() -> None:
    succeeds("""
    limit(60)
    try:
        _native.Pool(cpus(64))
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("there were threads for it")
    copy.run(_native.Pool(cpus(2)))
    assert target.all()
    """)
