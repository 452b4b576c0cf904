# SPDX-License-Identifier: Apache-2.0
"""What ``--rbln-max-prefill-run`` does to inter-token latency while long prompts arrive.

Four streams decode; eight prompts of 1,536 tokens arrive two at a time. For each bound (0 is
unbounded, the vendor's rule) the same load runs several times, the bounds in turn within a
round, on one engine.

usage: python -m benchmarks.mixed_load MODEL [--rounds N] [--json FILE]
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from vllm import LLM

from benchmarks.environment import write_result
from benchmarks.stepping import Stepper, Trace, random_prompt
from rbln_vllm.core.turns import TurnPolicy

STREAMS, STREAM_TOKENS = 4, 96
PROMPTS, PROMPT_TOKENS, EVERY = 8, 1536, 12
BOUNDS = (0, 1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=2048, enable_prefix_caching=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    rng = np.random.default_rng(0)
    measured: dict[int, list[dict[str, float]]] = {bound: [] for bound in BOUNDS}
    for _ in range(args.rounds):
        for bound in BOUNDS:
            scheduler.turns = TurnPolicy(bound)
            measured[bound].append(summary(run_load(llm, rng)))
    table = {bound: median_of(rows) for bound, rows in measured.items()}
    print(markdown(table))
    if args.json:
        write_result(args.json, {"benchmark": "mixed_load", "bounds": table})


def run_load(llm: LLM, rng: np.random.Generator) -> Trace:
    """Streams first; then two prompts every few steps."""
    stepper = Stepper(llm)
    for stream in range(STREAMS):
        stepper.add(f"stream-{stream}", random_prompt(rng, 32), STREAM_TOKENS)
    waiting = list(range(PROMPTS))

    def arrive(step: int) -> None:
        if step >= EVERY and step % EVERY == 0:
            for prompt in waiting[:2]:
                stepper.add(f"prompt-{prompt}", random_prompt(rng, PROMPT_TOKENS), 1)
            del waiting[:2]

    return stepper.run(arrive)


def summary(trace: Trace) -> dict[str, float]:
    """Milliseconds."""
    gaps = [g * 1e3 for s in range(STREAMS) for g in trace.gaps(f"stream-{s}")]
    first = [trace.time_to_first(f"prompt-{p}") * 1e3 for p in range(PROMPTS)]
    return {
        "itl_p50": statistics.median(gaps),
        "itl_p99": float(np.percentile(gaps, 99)),
        "itl_max": max(gaps),
        "ttft_p50": statistics.median(first),
        "ttft_max": max(first),
        "streams_done": max(trace.tokens[f"stream-{s}"][-1] for s in range(STREAMS)) * 1e3
        - min(trace.added.values()) * 1e3,
    }


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}


def markdown(table: dict[int, dict[str, Any]]) -> str:
    names = list(next(iter(table.values())))
    lines = [
        "| max_prefill_run | " + " | ".join(f"{name} (ms)" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for bound, row in table.items():
        lines.append(f"| {bound} | " + " | ".join(f"{row[name]:,.0f}" for name in names) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
