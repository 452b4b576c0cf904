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
import resource
from rbln_host import _native
import numpy as np

def limit(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

def program(op, arrays, numbers):
    operands = [
        None if a is None else _native.Tensor(
            i, 0, str(a.dtype), list(a.shape), [s // a.itemsize for s in a.strides]
        )
        for i, a in enumerate(arrays)
    ]
    sizes = [0 if a is None else a.nbytes for a in arrays]
    loaded = _native.Program([_native.Command(op, operands, numbers, "")], sizes, "portable")
    for i, a in enumerate(arrays):
        if a is not None:
            loaded.bind(i, a.ctypes.data, a.nbytes)
    return loaded

source, target = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
copy = program("copy", [source, target], {})
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
    """Attention to 2^30 positions from each of 8 sequences. The next command runs nevertheless."""
    succeeds(f"""
    kv = np.zeros((1, 1, 1 << 16, 32), np.float32)
    table = np.zeros((8, 1 << 14), np.int32)
    positions = np.full(8, (1 << 30) - 1, np.int32)
    query, out = np.zeros((8, 1, 16), np.float32), np.zeros((8, 1, 16), np.float32)
    numbers = {{"scale": 1.0, "window": 0.0, "soft_cap": 0.0}}
    tensors = [query, kv, table, positions, None, None, out]
    attention = program("paged_attention", tensors, numbers)
    pool = _native.Pool([0] * {threads})
    limit(200)
    for _ in range(2):
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
        _native.Pool([0] * 64)
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("there were threads for it")
    copy.run(_native.Pool([0, 0]))
    assert target.all()
    """)
