# SPDX-License-Identifier: Apache-2.0
"""What copying the head of a KV block costs, beside one memcpy of as many bytes.

The pool is that of SmolLM2-135M: 30 layers of 3 KV heads of 64 in bf16. Each round copies other
blocks, so that neither side finds its bytes in a cache, and all of them have been written before.
Times are medians; the ratio is of the least times, since other work can only lengthen one.

usage: python -m benchmarks.kv_copy [--rounds N] [--json FILE]
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.environment import write_result
from benchmarks.report import markdown_table
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.options import Executor, ExecutorOptions
from rbln_vllm.worker.kv_memory import lazy_bytes

LAYERS, HEADS, WIDTH = 30, 3, 128
BLOCKS, BLOCK = 12, 2048
TOKENS = (16, 128, 512, 2048)

Copy = Callable[[int, int, int], None]
"""Copies so many tokens of a block to another."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more would go on spinning while the others are measured
    ways = {
        "native": executor_copy(Executor.NATIVE),
        "reference": executor_copy(Executor.REFERENCE),
        "memcpy": one_memcpy(),
    }
    rows = [measure(ways, tokens, args.rounds) for tokens in TOKENS]
    print(markdown(rows))
    if args.json:
        write_result(args.json, {"benchmark": "kv_copy", "rows": rows})


def executor_copy(executor: Executor) -> Copy:
    """`copy_kv` of a pool."""
    executable = Executable(ExecutorOptions(executor))
    shape, size = (BLOCKS, HEADS, BLOCK, WIDTH), BLOCKS * bytes_of(BLOCK) // LAYERS
    memory = [lazy_bytes(size).fill_(1).view(torch.bfloat16) for _ in range(LAYERS)]
    executable.bind_kv({f"kv_{i}": layer.view(shape) for i, layer in enumerate(memory)})
    return lambda source, target, tokens: executable.copy_kv([(source, target, tokens)])


def one_memcpy() -> Copy:
    """The C library's, from one place of a buffer of the pool's size to another."""
    block_bytes = bytes_of(BLOCK)
    buffer = lazy_bytes(BLOCKS * block_bytes).fill_(1)

    def copy(source: int, target: int, tokens: int) -> None:
        start = buffer.data_ptr()
        ctypes.memmove(start + target * block_bytes, start + source * block_bytes, bytes_of(tokens))

    return copy


def bytes_of(tokens: int) -> int:
    """Of all layers, keys and values."""
    return tokens * LAYERS * HEADS * WIDTH * torch.bfloat16.itemsize


def measure(ways: dict[str, Copy], tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, taken in turn within a round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        source, target = number % BLOCKS, (number + BLOCKS // 2) % BLOCKS
        for name, copy in ways.items():
            began = time.perf_counter()
            copy(source, target, tokens)
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - began) * 1e3)
    medians = {f"{name}_ms": round(statistics.median(t), 3) for name, t in taken.items()}
    return {
        "tokens": tokens,
        "mib": round(bytes_of(tokens) / 2**20, 1),
        **medians,
        "native_to_memcpy": round(min(taken["native"]) / min(taken["memcpy"]), 2),
    }


def markdown(rows: list[dict[str, float]]) -> str:
    header = ["tokens", "MiB", "`copy_kv` (ms)", "reference executor (ms)", "one memcpy (ms)"]
    header.append("`copy_kv` / memcpy")
    return markdown_table(header, [[f"{value:,}" for value in row.values()] for row in rows])


if __name__ == "__main__":
    main()
