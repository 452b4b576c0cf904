# SPDX-License-Identifier: Apache-2.0
"""What drafts gain: servers with and without speculative decoding, on text that repeats and not.

The copy task's prompts are a random passage given twice and begun a third time: a small model goes
on copying, and n-grams find the passage. The free task's prompts are as long and repeat nothing,
and its answers are drawn at temperature 1, so that drafts are few and wrong. All servers are
started once and take the same requests in turn; those that wait are stopped.

usage: python -m benchmarks.speculation MODEL [--rounds N] [--configurations NAME...] [--json FILE]
       [--into PAGE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.engines.protocol import FIRST_TOKEN, LAST_TOKEN, Settings
from benchmarks.measure import Notes, rotated
from benchmarks.report import add_output_options, markdown_table, number, percent, publish
from benchmarks.routing import Prompt
from benchmarks.servers import Server, started
from benchmarks.systems import OURS

PASSAGE_TOKENS, BEGUN_TOKENS, TOKENS_OUT = 80, 8, 64
BATCHES = (1, 4)
REQUESTS = 8
"""A batch of each task in a round; a multiple of the largest batch."""
MAX_MODEL_LEN, MAX_NUM_SEQS, KV_GIB = 512, 4, 1
TASKS = {"copy": 0.0, "free": 1.0}
"""With the temperature of their answers: a small model that is greedy repeats itself."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Configuration:
    """A server; `speculation` is its ``--speculative-config``."""

    label: str
    speculation: Mapping[str, Any] = field(default_factory=dict)
    system: str = OURS

    @property
    def server_arguments(self) -> tuple[str, ...]:
        """Every prompt is computed, so that prefixes do not hide what a step costs."""
        arguments = ("--no-enable-prefix-caching",)
        if not self.speculation:
            return arguments
        return (*arguments, "--speculative-config", json.dumps(dict(self.speculation)))


CONFIGURATIONS = {
    "none": Configuration("no drafts"),
    "ngram": Configuration("n-grams, 4 drafts", NGRAM),
    "vllm_cpu": Configuration("vLLM CPU, no drafts", system="vllm_cpu_all"),
    "vllm_cpu_ngram": Configuration("vLLM CPU, n-grams, 4 drafts", NGRAM, "vllm_cpu_all"),
}


@dataclass(frozen=True)
class Taken:
    """One pass over a task's requests."""

    tokens_per_s: float
    counts: Mapping[str, float]
    """What the server's counters of drafts gained."""


Results = dict[tuple[str, str, int], list[Taken]]
"""By configuration, task and batch."""


def main() -> int:
    """Entry point; returns the exit code."""
    args = parse(sys.argv[1:])
    # A termination must leave through the `with` blocks that end the servers.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    notes = Notes()
    chosen = {name: CONFIGURATIONS[name] for name in args.configurations}
    with started(chosen, settings_of(args.model), "speculation", notes) as alive:
        results = measure(alive, 1 if args.quick else args.rounds, notes)
    rows = [row(*name, taken) for name, taken in results.items() if taken]
    result = {"benchmark": "speculation", "notes": notes.lines, "rows": rows}
    publish(args, "speculation", with_notes(markdown(rows), notes), result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS)
    )
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="only see that everything works")
    return parser.parse_args(arguments)


def settings_of(model: Path) -> Settings:
    return Settings(str(model.resolve()), MAX_MODEL_LEN, MAX_NUM_SEQS, KV_GIB)


def workload(task: str, requests: int, seed: int) -> list[Prompt]:
    """Prompts of one length, with a passage to copy or without."""
    generator = random.Random(f"{task}/{seed}")

    def words(count: int) -> Prompt:
        return generator.choices(range(FIRST_TOKEN, LAST_TOKEN), k=count)

    if task == "free":
        return [words(2 * PASSAGE_TOKENS + BEGUN_TOKENS) for _ in range(requests)]
    passages = [words(PASSAGE_TOKENS) for _ in range(requests)]
    return [passage + passage + passage[:BEGUN_TOKENS] for passage in passages]


def measure(alive: dict[str, Server], rounds: int, notes: Notes) -> Results:
    """Each task and batch on every server in turn; which goes first changes."""
    results: Results = {
        (name, task, batch): [] for name in alive for task in TASKS for batch in BATCHES
    }
    first = partial(take, prompts=workload("copy", MAX_NUM_SEQS, seed=-1), batch=MAX_NUM_SEQS)
    for name in list(alive):
        take_if_alive(alive, name, first, notes)  # warms up
    for turn in range(rounds):
        for task, temperature in TASKS.items():
            prompts = workload(task, REQUESTS, turn)
            for batch in BATCHES:
                one_pass = partial(take, prompts=prompts, batch=batch, temperature=temperature)
                for name in rotated(list(alive), turn):
                    results[name, task, batch] += take_if_alive(alive, name, one_pass, notes)
        print(f"round {turn + 1} of {rounds} done", flush=True)
    return results


def take_if_alive(
    alive: dict[str, Server], name: str, one_pass: Callable[[Server], Taken], notes: Notes
) -> list[Taken]:
    """One pass, or none of a server that fails now: it is left out from now on, with a note."""
    try:
        return [one_pass(alive[name])]
    except (openai.OpenAIError, httpx.HTTPError) as error:
        notes.add(f"{name} is left out: {error}")
        del alive[name]
        return []


def take(server: Server, prompts: Sequence[Prompt], batch: int, temperature: float = 0.0) -> Taken:
    """All prompts, `batch` at a time."""
    direct = openai.DefaultHttpxClient(trust_env=False)  # this machine, so through no proxy
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct)

    def ask(prompt: Prompt) -> None:
        client.completions.create(
            model=server.settings.model,
            prompt=prompt,
            max_tokens=TOKENS_OUT,
            temperature=temperature,
            seed=prompt[0],
            extra_body={"ignore_eos": True},
        )

    with server.running():
        before = counts_of(server.url)
        started = time.perf_counter()
        with ThreadPoolExecutor(batch) as pool:
            list(pool.map(ask, prompts))
        seconds = time.perf_counter() - started
        after = counts_of(server.url)
    gained = {name: after[name] - before[name] for name in COUNTERS}
    return Taken(len(prompts) * TOKENS_OUT / seconds, gained)


def counts_of(url: str) -> dict[str, float]:
    """The server's counters of drafts; 0 where it has none. Raises `httpx.HTTPError`."""
    with httpx.Client(trust_env=False) as client:
        text = client.get(f"{url}/metrics").raise_for_status().text
    return parse_counts(text)


def parse_counts(text: str) -> dict[str, float]:
    """Of a page in Prometheus' text format, summed over engines."""
    counts = dict.fromkeys(COUNTERS, 0.0)
    for line in text.splitlines():
        for name in COUNTERS:
            if line.startswith(f"vllm:spec_decode_{name}_total{{"):
                counts[name] += float(line.rpartition(" ")[2])
    return counts


def with_notes(table: str, notes: Notes) -> str:
    """What is missing in a table is said below it, without the logs."""
    return "\n\n".join([table, *(line.partition("\n")[0] for line in notes.lines)])


def row(name: str, task: str, batch: int, taken: Sequence[Taken]) -> dict[str, Any]:
    """Figures of one server: rates of all rounds, and the share of drafts that stood."""
    rates = [one.tokens_per_s for one in taken]
    total = {counter: sum(one.counts[counter] for one in taken) for counter in COUNTERS}
    drafted = total["num_draft_tokens"]
    return {
        "configuration": name,
        "task": task,
        "batch": batch,
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_rounds": [round(rate, 1) for rate in rates],
        "drafted": drafted,
        "accepted_share": round(total["num_accepted_tokens"] / drafted, 3) if drafted else None,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation: a line for each server and task."""
    header = ["", "task", *(f"tok/s, {batch} at a time" for batch in BATCHES), "drafts that stood"]
    by_key = {(one["configuration"], one["task"], one["batch"]): one for one in rows}
    lines = []
    for name, chosen in CONFIGURATIONS.items():
        for task in TASKS:
            ones = [by_key.get((name, task, batch)) for batch in BATCHES]
            found = [one for one in ones if one is not None]
            if not found:
                continue
            share = found[0]["accepted_share"]
            rates = [number(one["tokens_per_s"]) if one else "" for one in ones]
            lines.append([chosen.label, task, *rates, "" if share is None else percent(share)])
    return markdown_table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
