# SPDX-License-Identifier: Apache-2.0
"""What drafters that are models gain: servers without drafts and with, on questions in a chat.

A drafter is trained as in examples/train_drafter; without one, the model's own first layers draft,
which costs little to make and guesses badly. All servers are started once and take the same
requests in turn; those that wait are stopped.

usage: python -m benchmarks.draft_models MODEL [--drafter METHOD=DIR...] [--layers N] [--drafts K]
       [--rounds N] [--upstream] [--json FILE] [--into PAGE] [--quick]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Notes, rotated
from benchmarks.report import add_output_options, markdown_table, number, percent, publish
from benchmarks.routing import Prompt
from benchmarks.servers import Server, started
from benchmarks.speculation import (
    BATCHES,
    MAX_NUM_SEQS,
    Configuration,
    Taken,
    row,
    settings_of,
    take,
    take_if_alive,
    with_notes,
)

UPSTREAM = "vllm_cpu_all"
QUESTIONS = (
    "How does a lighthouse work?",
    "Write a letter to a neighbour about a noisy party.",
    "What should I pack for a week in the mountains?",
    "Explain what a loan with interest is.",
    "Tell me a story about a clever fox.",
    "Why do leaves change colour in autumn?",
    "Write a Python function that counts the vowels of a word.",
    "What are the advantages of working from home?",
)
"""None of them is among those that examples/train_drafter asks."""


def main() -> int:
    """Entry point; returns the exit code."""
    args = parse(sys.argv[1:])
    # A termination must leave through the `with` blocks that end the servers.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    notes = Notes()
    with tempfile.TemporaryDirectory() as scratch:
        drafters = dict(text.split("=", 1) for text in args.drafter)
        if args.layers:
            drafters["draft_model"] = str(truncated(args.model, args.layers, Path(scratch)))
        chosen = configurations(drafters, args.drafts, upstream=args.upstream)
        with started(chosen, settings_of(args.model), "drafts", notes) as alive:
            results = measure(alive, questions(args.model), 1 if args.quick else args.rounds, notes)
    rows = [row(name, "chat", batch, taken) for (name, batch), taken in results.items() if taken]
    table = with_notes(markdown(rows, chosen), notes)
    result = {"benchmark": "draft_models", "notes": notes.lines, "rows": rows}
    publish(args, "draft models", table, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafter", nargs="*", default=[], metavar="METHOD=DIR")
    parser.add_argument("--layers", type=int, default=0, help="the model's first layers draft, too")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--upstream", action="store_true", help="vLLM's CPU backend as well")
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="only see that everything works")
    return parser.parse_args(arguments)


def configurations(
    drafters: Mapping[str, str], drafts: int, *, upstream: bool
) -> dict[str, Configuration]:
    """A server without drafts and one for each drafter, by method; the same of vLLM's."""
    found = {"none": Configuration("no drafts")}
    for method, directory in drafters.items():
        speculation = {"method": method, "model": directory, "num_speculative_tokens": drafts}
        found[method] = Configuration(f"{method}, {drafts} drafts", speculation)
    if upstream:
        for name, ours in list(found.items()):
            label = f"vLLM CPU, {ours.label}"
            found[f"vllm_cpu_{name}"] = Configuration(label, ours.speculation, UPSTREAM)
    return found


def truncated(model: Path, layers: int, directory: Path) -> Path:
    """The model's embedding, first layers and head as a model of its own."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    loaded.model.layers = loaded.model.layers[:layers]
    loaded.config.num_hidden_layers = layers
    loaded.save_pretrained(directory)
    return directory


def questions(model: Path) -> list[Prompt]:
    """Each as the model is asked in a chat."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        for chat in chats
    ]


def measure(
    alive: dict[str, Server], prompts: list[Prompt], rounds: int, notes: Notes
) -> dict[tuple[str, int], list[Taken]]:
    """Every server in turn, one and several requests at a time; which goes first changes."""
    results: dict[tuple[str, int], list[Taken]] = {(n, b): [] for n in alive for b in BATCHES}
    first = partial(take, prompts=prompts[:MAX_NUM_SEQS], batch=MAX_NUM_SEQS)
    for name in list(alive):
        take_if_alive(alive, name, first, notes)  # warms up
    for turn in range(rounds):
        for batch in BATCHES:
            one_pass = partial(take, prompts=prompts, batch=batch)
            for name in rotated(list(alive), turn):
                results[name, batch] += take_if_alive(alive, name, one_pass, notes)
        print(f"round {turn + 1} of {rounds} done", flush=True)
    return results


def markdown(rows: list[dict[str, Any]], chosen: Mapping[str, Configuration]) -> str:
    """The table of the documentation: a line for each server."""
    header = ["", *(f"tok/s, {batch} at a time" for batch in BATCHES), "drafts that stood"]
    by_key = {(one["configuration"], one["batch"]): one for one in rows}
    lines = []
    for name, one in chosen.items():
        found = [by_key[name, batch] for batch in BATCHES if (name, batch) in by_key]
        if found:
            share = found[0]["accepted_share"]
            rates = [number(figures["tokens_per_s"]) for figures in found]
            lines.append([one.label, *rates, "" if share is None else percent(share)])
    return markdown_table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
