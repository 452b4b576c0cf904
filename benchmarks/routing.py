# SPDX-License-Identifier: Apache-2.0
"""Time to first token of shared prefixes behind a router: `kv_aware` against `round_robin`.

Two servers on the same cores, each with a KV pool that holds about half of the prefixes: which
server a request goes to decides whether its prefix is still there. Both routers stand before the
same servers; policies take turns within a round, with new prompts and emptied caches each time.

usage: python -m benchmarks.routing MODEL [--rounds N] [--requests N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

from benchmarks.environment import write_result
from benchmarks.measure import rotated
from benchmarks.paths import COMPILE_CACHES, LOGS
from examples.kv_aware_routing.cluster import KV_AWARE, Cluster, RouterProcess
from scripts.server_process import ServerProcess

POLICIES = (KV_AWARE, "round_robin")
PREFIXES, PREFIX_TOKENS = 8, (1024, 2048)  # the least and the greatest length
QUESTION_TOKENS, TOKENS_OUT = 32, 8
CONCURRENCY = 4
BLOCK, SUB_BLOCK = 128, 16
MAX_MODEL_LEN = 2304
# Half of the prefixes at their mean length, and a request that is computed.
POOL_TOKENS = PREFIXES * sum(PREFIX_TOKENS) // 4 + MAX_MODEL_LEN
WORDS = (1000, 40000)  # ordinary tokens of a large vocabulary

Prompt = list[int]


@dataclass(frozen=True)
class Answer:
    """One request, seen by the client."""

    ttft_s: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ValueError(f"{self.cached_tokens} of {self.prompt_tokens} tokens from the cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48, help="of each policy in a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with routers(args.model) as (cluster, by_policy):
        rounds = measure(cluster, by_policy, args.model, args.rounds, args.requests)
    medians = {policy: median_of(rows) for policy, rows in rounds.items()}
    print(markdown(medians))
    if args.json:
        sizes = {"pool_tokens": POOL_TOKENS, "prefix_tokens": PREFIX_TOKENS, "prefixes": PREFIXES}
        result = {"benchmark": "routing", **sizes, "policies": medians, "rounds": rounds}
        write_result(args.json, result)


@contextlib.contextmanager
def routers(model: str) -> Iterator[tuple[Cluster, dict[str, RouterProcess]]]:
    """The cluster, and a router of each policy before it."""
    logs = LOGS / "routing"
    arguments = [model, "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
    arguments += ["--max-num-seqs", str(CONCURRENCY), "--block-size", str(BLOCK)]
    arguments += ["--rbln-sub-block-size", str(SUB_BLOCK)]
    arguments += ["--num-gpu-blocks-override", str(1 + POOL_TOKENS // BLOCK)]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_CACHE_ROOT": str(COMPILE_CACHES / "ours" / "vllm"),
    }
    cluster = Cluster(arguments, granule=SUB_BLOCK, logs=logs, env=variables)
    with cluster, contextlib.ExitStack() as stack:
        by_policy: dict[str, RouterProcess] = {KV_AWARE: cluster.router}
        for policy in POLICIES[1:]:
            router = cluster.new_router(logs / f"router-{policy}.log", policy=policy)
            by_policy[policy] = stack.enter_context(router)
        yield cluster, by_policy


def measure(
    cluster: Cluster,
    by_policy: dict[str, RouterProcess],
    model: str,
    rounds: int,
    requests: int,
) -> dict[str, list[dict[str, float]]]:
    """Figures of each policy in each round."""
    rows: dict[str, list[dict[str, float]]] = {policy: [] for policy in by_policy}
    for server in cluster.servers:
        load(server.url, model, workload(2, seed=-1))  # warms up
    for number in range(rounds):
        for turn, policy in enumerate(rotated(list(by_policy), number)):
            empty_caches(cluster.servers)
            prompts = workload(requests, seed=number * len(by_policy) + turn)
            rows[policy].append(figures(*load(by_policy[policy].url, model, prompts)))
            print(f"round {number + 1} of {rounds}, {policy}: {rows[policy][-1]}", flush=True)
    return rows


def empty_caches(servers: Sequence[ServerProcess]) -> None:
    """Forget all prefixes. Raises `httpx.HTTPError`."""
    with httpx.Client(trust_env=False) as client:
        for server in servers:
            client.post(f"{server.url}/reset_prefix_cache").raise_for_status()


def workload(requests: int, seed: int) -> list[Prompt]:
    """Prompts that begin with one of `PREFIXES` prefixes and end with tokens of their own."""
    generator = random.Random(seed)

    def words(count: int) -> Prompt:
        return [generator.randrange(*WORDS) for _ in range(count)]

    prefixes = [words(generator.randint(*PREFIX_TOKENS)) for _ in range(PREFIXES)]
    return [generator.choice(prefixes) + words(QUESTION_TOKENS) for _ in range(requests)]


def load(
    url: str, model: str, prompts: Sequence[Prompt], tokens_out: int = TOKENS_OUT
) -> tuple[list[Answer], float]:
    """Send all, `CONCURRENCY` at a time; the answers, and the seconds of the whole."""
    direct = openai.DefaultHttpxClient(trust_env=False)  # this machine, so through no proxy
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", http_client=direct)
    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda prompt: ask(client, model, prompt, tokens_out), prompts))
    return answers, time.perf_counter() - started


def ask(client: openai.OpenAI, model: str, prompt: Prompt, tokens_out: int) -> Answer:
    """One streamed completion. Every field is one that the router knows."""
    started = time.perf_counter()
    chunks = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens_out,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    first = usage = None
    for chunk in chunks:
        first = first or time.perf_counter()
        usage = chunk.usage or usage
    if first is None or usage is None or usage.prompt_tokens_details is None:
        raise openai.OpenAIError("the answer has no text, or its usage tells no cached tokens")
    cached = usage.prompt_tokens_details.cached_tokens or 0
    ended = time.perf_counter()
    return Answer(first - started, ended - started, usage.prompt_tokens, cached)


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Milliseconds, a share of prompt tokens, requests per second."""
    first = sorted(answer.ttft_s * 1e3 for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return {
        "ttft_p50_ms": round(statistics.median(first), 1),
        "ttft_mean_ms": round(statistics.mean(first), 1),
        "ttft_p95_ms": round(first[len(first) * 95 // 100], 1),
        "cached_share": round(cached / sum(answer.prompt_tokens for answer in answers), 3),
        "requests_per_s": round(len(answers) / seconds, 2),
    }


def median_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def markdown(policies: dict[str, dict[str, float]]) -> str:
    lines = [
        "| policy | TTFT median (ms) | mean | 95 % | prompt tokens from cache | requests/s |",
        "|---|---|---|---|---|---|",
    ]
    for policy, row in policies.items():
        times = [f"{row[name]:,.0f}" for name in ("ttft_p50_ms", "ttft_mean_ms", "ttft_p95_ms")]
        shares = [f"{row['cached_share']:.0%}", f"{row['requests_per_s']:.2f}"]
        lines.append("| " + " | ".join([f"`{policy}`", *times, *shares]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
