# SPDX-License-Identifier: Apache-2.0
"""Prefill rate and decode step for chunk and block sizes: where HOST's defaults come from.

One engine per configuration, all in this run; each figure is the median of several.

usage: python benchmarks/host_sizes.py MODEL [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

CHUNKS = (128, 256, 512, 1024)
BLOCKS = (16, 64, 128, 512)
DEFAULT_CHUNK, DEFAULT_BLOCK = 512, 128
PROMPT, BATCH, DECODE_TOKENS, REPEATS = 1024, 8, 24, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, type=int, metavar=("CHUNK", "BLOCK"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.model, *args.one)))
        return
    sizes = [(chunk, DEFAULT_BLOCK) for chunk in CHUNKS]
    sizes += [(DEFAULT_CHUNK, block) for block in BLOCKS if block != DEFAULT_BLOCK]
    rows = [run_one(args.model, chunk, block) for chunk, block in sizes]
    print(markdown(rows))
    if args.json:
        from environment import write_result

        write_result(args.json, {"benchmark": "host_sizes", "rows": rows})


def run_one(model: str, chunk: int, block: int) -> dict[str, float]:
    """A process of its own, so that each engine starts from nothing."""
    command = [sys.executable, __file__, model, "--one", str(chunk), str(block)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def measure(model: str, chunk: int, block: int) -> dict[str, float]:
    """Prefill tokens/s of one long prompt; milliseconds of a decode step of a batch."""
    import numpy as np
    from vllm import LLM

    from stepping import Stepper, random_prompt

    llm = LLM(
        model,
        max_model_len=2048,
        max_num_seqs=BATCH,
        max_num_batched_tokens=chunk,
        block_size=block,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(0)
    prefill, decode = [], []
    for repeat in range(REPEATS + 1):
        stepper = Stepper(llm)
        stepper.add(f"long-{repeat}", random_prompt(rng, PROMPT), 1)
        started = time.perf_counter()
        stepper.run()
        prefill.append(PROMPT / (time.perf_counter() - started))
        for row in range(BATCH):
            stepper.add(f"{repeat}-{row}", random_prompt(rng, 128), DECODE_TOKENS)
        trace = stepper.run()
        # The last gaps are those of the full batch.
        gaps = [gap for row in range(BATCH) for gap in trace.gaps(f"{repeat}-{row}")[-8:]]
        decode.append(statistics.median(gaps) * 1e3)
    return {
        "chunk": chunk,
        "block": block,
        "prefill_tokens_per_s": round(statistics.median(prefill[1:])),
        "decode_step_ms": round(statistics.median(decode[1:]), 1),
    }


def markdown(rows: list[dict[str, float]]) -> str:
    lines = ["| chunk | block | prefill tok/s | decode step, batch 8 (ms) |", "|---|---|---|---|"]
    for row in rows:
        lines.append("| " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
