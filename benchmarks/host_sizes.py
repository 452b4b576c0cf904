# SPDX-License-Identifier: Apache-2.0
"""Prefill rate and decode step for chunk and block sizes: where HOST's defaults come from.

Each configuration is compiled in a process of its own; then all programs run in this process,
configurations in turn within a round, so that they share whatever else the machine does. Only
programs are timed, not the engine around them.

usage: python -m benchmarks.host_sizes MODEL [--rounds N] [--json FILE]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import write_result
from rbln_host.compiler.artifact import Artifact
from rbln_host.runtime.executable import Executable

MAX_MODEL_LEN, BATCH, PROMPT, CONTEXT = 2048, 8, 1024, 512
CHUNKS, BLOCKS = (64, 128, 256, 512, 1024), (16, 64, 128, 512)
DEFAULT_CHUNK, DEFAULT_BLOCK = 512, 128


@dataclass(frozen=True)
class Sizes:
    """One configuration, in tokens."""

    chunk: int
    block: int


@dataclass(frozen=True)
class Loaded:
    """Its programs, bound to a pool that holds one batch."""

    sizes: Sizes
    executable: Executable

    def prefill(self) -> float:
        """Tokens per second of a prompt of ``PROMPT`` tokens in chunks."""
        chunk = self.sizes.chunk
        started = time.perf_counter()
        for start in range(0, PROMPT, chunk):
            positions_N = torch.arange(start, start + chunk)
            self.executable.run(f"prefill_b1_q{chunk}", self._inputs(positions_N, rows=1))
        return PROMPT / (time.perf_counter() - started)

    def decode(self) -> float:
        """Milliseconds of a step of ``BATCH`` rows with ``CONTEXT`` tokens each."""
        inputs = self._inputs(torch.full((BATCH,), CONTEXT), rows=BATCH)
        started = time.perf_counter()
        self.executable.run(f"decode_b{BATCH}_q1", inputs)
        return (time.perf_counter() - started) * 1e3

    def _inputs(self, positions_N: Tensor, rows: int) -> dict[str, Tensor]:
        block, width = self.sizes.block, MAX_MODEL_LEN // self.sizes.block
        used = -(-int(positions_N.max() + 1) // block)
        table_BT = torch.zeros(rows, width, dtype=torch.int32)
        table_BT[:, :used] = 1 + torch.arange(rows * used, dtype=torch.int32).view(rows, used)
        row_N = torch.arange(positions_N.numel()) // (positions_N.numel() // rows)
        block_N = table_BT[row_N, positions_N // block].long()
        return {
            "input_ids": torch.ones_like(positions_N, dtype=torch.int32),
            "positions": positions_N,
            "block_table": table_BT,
            "slots": block_N * block + positions_N % block,
            "query_pos": positions_N.int(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [Sizes(chunk, DEFAULT_BLOCK) for chunk in CHUNKS]
    sizes += [Sizes(DEFAULT_CHUNK, block) for block in BLOCKS if block != DEFAULT_BLOCK]
    with tempfile.TemporaryDirectory() as root:
        rows = measure([load(compiled(args.model, one, Path(root)), one) for one in sizes], args)
    print(markdown(rows))
    if args.json:
        write_result(args.json, {"benchmark": "host_sizes", "rows": rows})


def compiled(model: str, sizes: Sizes, root: Path) -> Path:
    """The artifact of a configuration, made by a compile-only start."""
    cache = root / f"{sizes.chunk}-{sizes.block}"
    code = (
        "from vllm import LLM\n"
        f"LLM({model!r}, max_model_len={MAX_MODEL_LEN}, max_num_seqs={BATCH}, "
        f"max_num_batched_tokens={sizes.chunk}, block_size={sizes.block})\n"
    )
    variables = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_RBLN_COMPILE_ONLY": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    print(f"compiled: chunk {sizes.chunk}, block {sizes.block}", flush=True)
    return next(cache.glob("rbln/*/*/rbln_config.json")).parent


def load(directory: Path, sizes: Sizes) -> Loaded:
    artifact, executable = Artifact.open(directory), Executable()
    executable.add_artifact(artifact)
    blocks = 1 + BATCH * (MAX_MODEL_LEN // sizes.block)
    for index, layer in enumerate(artifact.manifest.model["kv_layers"]):
        shape = (blocks, layer["num_kv_heads"], sizes.block, 2 * layer["head_size"])
        pool = torch.zeros(shape, dtype=getattr(torch, layer["dtype"]))
        executable.bind({f"kv_{index}": pool})
    return Loaded(sizes, executable)


def measure(loaded: list[Loaded], args: argparse.Namespace) -> list[dict[str, float]]:
    prefill: dict[Sizes, list[float]] = {one.sizes: [] for one in loaded}
    decode: dict[Sizes, list[float]] = {one.sizes: [] for one in loaded}
    for number in range(args.rounds + 1):
        for one in loaded:
            rate, step = one.prefill(), one.decode()
            if number:  # the first round warms up
                prefill[one.sizes].append(rate)
                decode[one.sizes].append(step)
    return [
        {
            "chunk": sizes.chunk,
            "block": sizes.block,
            "prefill_tokens_per_s": round(statistics.median(prefill[sizes])),
            "decode_step_ms": round(statistics.median(decode[sizes]), 1),
        }
        for sizes in prefill
    ]


def markdown(rows: list[dict[str, float]]) -> str:
    lines = ["| chunk | block | prefill tok/s | decode step, batch 8 (ms) |", "|---|---|---|---|"]
    for row in rows:
        lines.append("| " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
