# SPDX-License-Identifier: Apache-2.0
"""Requests that share long system prompts: what each way of caching prefixes gains.

Eight system prompts of 1,000 to 3,000 tokens; a request is one of them and a question of its own,
four requests at a time over HTTP. All servers are started once and take slices of the same requests
in turn; those that wait are stopped. Servers that compute every prompt get a fifth of the requests,
since each takes many times as long.

usage: python -m benchmarks.shared_prefix MODEL [--requests N] [--configurations NAME...]
       [--json FILE] [--into PAGE] [--quick]
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.engines.protocol import FIRST_TOKEN, LAST_TOKEN, Settings
from benchmarks.measure import Notes, rotated
from benchmarks.report import add_output_options, markdown_table, number, percent, publish
from benchmarks.routing import Answer, Prompt, load
from benchmarks.servers import Server, started
from benchmarks.systems import OURS

SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, (1000, 3000)  # the least and the greatest length
QUESTION_TOKENS, TOKENS_OUT = 64, 32
SLICES, QUICK_REQUESTS = 4, 16
PART = 5
"""One request in so many goes to servers that compute every prompt."""
MAX_MODEL_LEN, MAX_NUM_SEQS, KV_GIB = 4096, 4, 2
# Blocks of 128 tokens for four requests at once, and next to nothing beside them.
SMALL_POOL = ("--num-gpu-blocks-override", "112")
LARGE_BLOCK = ("--block-size", "4096", "--max-num-batched-tokens", "256")
WHOLE = "--no-rbln-enable-sub-block-cache"  # an option of the vllm implementation alone
IMPLEMENTATION = ("--model-impl", "vllm")


@dataclass(frozen=True)
class Configuration:
    """A server; `computes_all` when it finds next to nothing of the prompts in its cache."""

    label: str
    arguments: tuple[str, ...] = ()
    computes_all: bool = False
    system: str = OURS

    @property
    def server_arguments(self) -> tuple[str, ...]:
        """The same implementation for all of ours, and usage that tells cached tokens."""
        implementation = IMPLEMENTATION if self.system == OURS else ()
        return (*self.arguments, *implementation, "--enable-prompt-tokens-details")


CONFIGURATIONS = {
    "none": Configuration("no cache", ("--no-enable-prefix-caching",), computes_all=True),
    "blocks": Configuration("whole blocks of 128", (WHOLE,)),
    "sub_blocks": Configuration("sub-blocks of 16 (the default)"),
    "large_blocks": Configuration(
        "whole blocks of 4,096", (*LARGE_BLOCK, WHOLE), computes_all=True
    ),
    "large_sub_blocks": Configuration(
        "sub-blocks of 128 in blocks of 4,096", (*LARGE_BLOCK, "--rbln-sub-block-size", "128")
    ),
    "small_pool": Configuration("a pool for running requests only", SMALL_POOL, computes_all=True),
    "offload": Configuration(
        "that pool and offload to memory", (*SMALL_POOL, "--kv-offloading-size", "2")
    ),
    "vllm_cpu": Configuration("vLLM CPU, all cores, its cache", system="vllm_cpu_all"),
}


@dataclass
class Taken:
    """What a server has answered, and the seconds that it took."""

    answers: list[Answer]
    seconds: float = 0.0


def main() -> int:
    """Entry point; returns the exit code."""
    args = parse(sys.argv[1:])
    # A termination must leave through the `with` blocks that end the servers.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    notes = Notes()
    requests = QUICK_REQUESTS if args.quick else args.requests
    settings = Settings(str(args.model.resolve()), MAX_MODEL_LEN, MAX_NUM_SEQS, KV_GIB)
    chosen = {name: CONFIGURATIONS[name] for name in args.configurations}
    with started(chosen, settings, "prefix", notes) as alive:
        taken = measure(alive, workload(requests, seed=0), notes)
    rows = [row(name, one) for name, one in taken.items() if one.answers]
    result = {"benchmark": "shared_prefix", "requests": requests, "notes": notes.lines}
    publish(args, "shared-prefix", markdown(rows), {**result, "rows": rows})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits with 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS)
    )
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="only see that everything works")
    options = parser.parse_args(arguments)
    if options.requests < SLICES * PART:
        parser.error(f"--requests must be at least {SLICES * PART}")
    return options


def workload(requests: int, seed: int) -> list[Prompt]:
    """Prompts that begin with a system prompt and end with tokens of their own."""
    generator = random.Random(seed)

    def words(count: int) -> Prompt:
        return generator.choices(range(FIRST_TOKEN, LAST_TOKEN), k=count)

    shared = [words(generator.randint(*SYSTEM_TOKENS)) for _ in range(SYSTEM_PROMPTS)]
    return [generator.choice(shared) + words(QUESTION_TOKENS) for _ in range(requests)]


def measure(alive: dict[str, Server], prompts: list[Prompt], notes: Notes) -> dict[str, Taken]:
    """Each slice of the requests on every server in turn; which goes first changes."""
    taken = {name: Taken([]) for name in alive}
    for turn in range(SLICES):
        for name in rotated(list(alive), turn):
            chosen = share_of(CONFIGURATIONS[name], prompts[turn::SLICES])
            try:
                answers, seconds = _load(alive[name], chosen)
            except openai.OpenAIError as error:
                notes.add(f"{CONFIGURATIONS[name].label}: {error}")
                del alive[name]
                continue
            taken[name].answers += answers
            taken[name].seconds += seconds
        print(f"slice {turn + 1} of {SLICES} done", flush=True)
    return taken


def share_of(configuration: Configuration, prompts: list[Prompt]) -> list[Prompt]:
    """All, or at least one, of the requests of a slice."""
    return prompts[::PART] if configuration.computes_all else prompts


def _load(server: Server, prompts: Sequence[Prompt]) -> tuple[list[Answer], float]:
    with server.running():
        warm_up = [Prompt(range(FIRST_TOKEN, FIRST_TOKEN + 8))]
        load(server.url, server.settings.model, warm_up, TOKENS_OUT)
        return load(server.url, server.settings.model, prompts, TOKENS_OUT)


def row(name: str, taken: Taken) -> dict[str, Any]:
    """Figures of one server: milliseconds, shares of prompt tokens, rates per second."""
    first = sorted(answer.ttft_s * 1e3 for answer in taken.answers)
    tokens = sum(answer.prompt_tokens for answer in taken.answers)
    return {
        "configuration": name,
        "requests": len(taken.answers),
        "ttft_p50_ms": round(statistics.median(first), 1),
        "ttft_mean_ms": round(statistics.mean(first), 1),
        "ttft_p95_ms": round(first[len(first) * 95 // 100], 1),
        "cached_share": round(sum(a.cached_tokens for a in taken.answers) / tokens, 4),
        "computed_tokens_per_request": round(
            statistics.mean(a.prompt_tokens - a.cached_tokens for a in taken.answers), 1
        ),
        "requests_per_s": round(len(taken.answers) / taken.seconds, 3),
        "tokens_out_per_s": round(len(taken.answers) * TOKENS_OUT / taken.seconds, 1),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation."""
    header = ["", "requests", "TTFT median (ms)", "mean", "95 %", "prompt from cache"]
    header += ["computed per request", "requests/s", "output tok/s"]
    return markdown_table(header, [_cells(one) for one in rows])


def _cells(one: dict[str, Any]) -> list[str]:
    times = [number(one[name]) for name in ("ttft_p50_ms", "ttft_mean_ms", "ttft_p95_ms")]
    return [
        CONFIGURATIONS[one["configuration"]].label,
        str(one["requests"]),
        *times,
        percent(one["cached_share"]),
        number(one["computed_tokens_per_request"]),
        number(one["requests_per_s"]),
        number(one["tokens_out_per_s"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
