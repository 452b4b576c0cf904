# SPDX-License-Identifier: Apache-2.0
"""Load over HTTP with `vllm bench serve`: time to first token, time per token, throughput.

Servers are measured in turn within a round; the one that is not measured is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drivers import EngineError
from benchmarks.measure import Notes, rotated
from benchmarks.paths import ROOT
from benchmarks.plan import Plan
from benchmarks.servers import Server

LEAST_REQUESTS = 8
TOKENS_IN = TOKENS_OUT = 128
FIGURES = {
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "tokens_per_s": "output_throughput",
}

# concurrency -> system -> figures of each round
Loads = dict[str, dict[str, list[dict[str, float]]]]


def measure_servers(
    servers: Sequence[Server], plan: Plan, notes: Notes, seconds: float
) -> dict[str, Any]:
    """Start all, load them in turn, end them. A server that fails is left out with a note."""
    loads: Loads = {str(c): {s.system.name: [] for s in servers} for c in plan.concurrency}
    with contextlib.ExitStack() as stack:
        alive = _start_all(servers, stack, notes)
        for number in range(plan.fewer_rounds):
            for concurrency in plan.concurrency:
                requests = max(LEAST_REQUESTS, plan.requests_per_place * concurrency)
                for name in rotated(list(alive), number):
                    try:
                        figures = load(alive[name], concurrency, requests, number, seconds)
                    except EngineError as error:
                        notes.add(str(error))
                        del alive[name]
                    else:
                        loads[str(concurrency)][name].append(figures)
            print(f"serving: round {number + 1} of {plan.fewer_rounds} done", flush=True)
    return {"tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT, "loads": loads}


def _start_all(
    servers: Sequence[Server], stack: contextlib.ExitStack, notes: Notes
) -> dict[str, Server]:
    alive: dict[str, Server] = {}
    for server in servers:
        try:
            alive[server.system.name] = stack.enter_context(server)
        except EngineError as error:
            notes.add(str(error))
        else:
            print(f"serving: {server.system.label}", flush=True)
    return alive


def load(
    server: Server, concurrency: int, requests: int, seed: int, seconds: float
) -> dict[str, float]:
    """Figures of one load. Raises EngineError when the client fails or a request does."""
    with tempfile.TemporaryDirectory() as folder, server.running():
        result = Path(folder) / "result.json"
        command = client_command(
            server, result, concurrency=concurrency, requests=requests, seed=seed
        )
        _run_client(server, command, seconds)
        if not result.exists():
            raise EngineError(f"{server.system.label}: `vllm bench serve` wrote no result")
        return figures_of(json.loads(result.read_text()), requests)


def _run_client(server: Server, command: list[str], seconds: float) -> None:
    variables = {**os.environ, "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{server.system.label}: load not done in {seconds:.0f} s") from error
    if done.returncode != 0:
        raise EngineError(f"{server.system.label}: {done.stdout[-2000:]}")


def client_command(
    server: Server, result: Path, *, concurrency: int, requests: int, seed: int
) -> list[str]:
    """`vllm bench serve` with random prompts, all of one length."""
    return [
        *[sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"],
        *["--backend", "openai", "--base-url", server.url, "--model", server.settings.model],
        *["--dataset-name", "random", "--seed", str(seed)],
        *["--random-input-len", str(TOKENS_IN), "--random-output-len", str(TOKENS_OUT)],
        *["--num-prompts", str(requests), "--max-concurrency", str(concurrency)],
        *["--num-warmups", str(min(concurrency, 2)), "--ignore-eos", "--temperature", "0"],
        *["--disable-tqdm", "--save-result", "--result-dir", str(result.parent)],
        *["--result-filename", result.name],
    ]


def figures_of(result: dict[str, Any], requests: int) -> dict[str, float]:
    """The figures in the client's result. Raises EngineError when a request did not complete."""
    if result["completed"] != requests:
        raise EngineError(f"only {result['completed']} of {requests} requests completed")
    return {ours: round(float(result[theirs]), 2) for ours, theirs in FIGURES.items()}
