# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts beside vLLM's CPU backend and Sentence-Transformers, in one run.

Every system gets the same texts as strings, all at once, tokenises them itself and gives
normalised vectors; what counts is texts per second. Two loads: short texts of some ten words, and
mixed ones of 3 to 160. Systems are measured in turn, so that all see the same machine; before the
first round each embeds every load once. The vectors of one system are compared with the others'.

usage: python -m benchmarks.pooling MODEL [--rounds N] [--dtypes float32 bfloat16] [--json FILE]

MODEL is all-MiniLM-L6-v2 (scripts/make_minilm.py). `make peers` installs Sentence-Transformers.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drivers import Driver, EngineError
from benchmarks.engines.protocol import Settings
from benchmarks.environment import write_result
from benchmarks.measure import Notes
from benchmarks.report import markdown_table
from benchmarks.systems import SYSTEMS, System

OURS = "ours"
LENGTH, SEQUENCES, SECONDS, SHOWN = 256, 64, 600.0, 16
TEXT = """
    the of and to in a is that for it as was with be by on not he his but at are this have from
    or had an they which one you were all her she there would their we him been has when who will
    no more if out so up said what its about than into them can only other time new some could
    these two may first then do any like my now over such our man me even most made after also
    did many off before must well back through years where much your way down should because long
"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Load:
    """`texts` many, each of a number of words drawn between the bounds."""

    texts: int
    fewest: int
    most: int

    def make(self, seed: int) -> list[str]:
        draw = random.Random(seed)
        lengths = [draw.randint(self.fewest, self.most) for _ in range(self.texts)]
        return [" ".join(draw.choices(WORDS, k=length)) for length in lengths]


LOADS = {"short": Load(512, 6, 14), "mixed": Load(256, 3, 160)}


@dataclass
class Measured:
    """What one system has taken, in seconds per round, by load."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    vectors: list[list[float]] = field(default_factory=list)

    def texts_per_second(self, load: str) -> float:
        """The median over rounds."""
        return LOADS[load].texts / statistics.median(self.seconds[load])


def systems(dtype: str) -> Iterator[System]:
    """The three systems in a precision."""
    variables = {"BENCH_DTYPE": dtype}
    upstream = SYSTEMS["vllm_cpu_all"].variables
    yield System(f"embed_{OURS}_{dtype}", OURS, "embed_ours", "hf", variables=variables)
    yield System(
        f"embed_vllm_cpu_{dtype}",
        "vLLM CPU",
        "embed_vllm_cpu",
        "hf",
        variables={**upstream, **variables},
    )
    yield System(
        f"embed_st_{dtype}",
        "Sentence-Transformers",
        "embed_sentence_transformers",
        "hf",
        environment="sentence_transformers",
        variables=variables,
    )


def measure(model: Path, dtype: str, rounds: int, notes: Notes) -> dict[str, Measured]:
    """All systems of a precision, round by round, in turn; those that fail are noted."""
    settings = Settings(str(model), LENGTH, SEQUENCES, kv_gib=1)
    found: dict[str, Measured] = {}
    with ExitStack() as stack:
        drivers = {}
        for system in systems(dtype):
            if (missing := system.missing()) is not None:
                notes.add(missing)
                continue
            try:
                driver = stack.enter_context(Driver(system, settings, seconds=SECONDS))
            except EngineError as error:
                notes.add(str(error))
                continue
            drivers[system.label] = driver
        for number in range(-1, rounds):  # the first is not counted
            for label, driver in drivers.items():
                _round(driver, found.setdefault(label, Measured()), number)
    return found


def _round(driver: Driver, measured: Measured, number: int) -> None:
    for name, load in LOADS.items():
        seed = max(number, 0)
        answer = driver.ask("embed", texts=load.make(seed), shown=SHOWN if number < 0 else 0)
        if number < 0:
            measured.vectors += answer["vectors"]
            continue
        measured.seconds.setdefault(name, []).append(answer["seconds"])
        measured.tokens[name] = answer["tokens"]


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest cosine distance between the vectors of the same text, all normalised."""
    pairs = zip(ours, theirs, strict=True)
    return max(1 - sum(a * b for a, b in zip(one, other, strict=True)) for one, other in pairs)


def rows(dtype: str, found: Mapping[str, Measured]) -> Iterator[dict[str, Any]]:
    """A row for each system and load; `ours` says how many times as fast this project is."""
    for load, made in LOADS.items():
        for label, measured in found.items():
            rate = measured.texts_per_second(load)
            yield {
                "precision": dtype,
                "load": load,
                "system": label,
                "texts/s": round(rate, 1),
                "lowest": round(made.texts / max(measured.seconds[load]), 1),
                "highest": round(made.texts / min(measured.seconds[load]), 1),
                "ours": round(found[OURS].texts_per_second(load) / rate, 2),
                "distance": f"{distance(found[OURS].vectors, measured.vectors):.1e}",
            }


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # A termination must leave through the `with` blocks that end the engines.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    notes = Notes()
    table: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        found = measure(args.model.resolve(), dtype, args.rounds, notes)
        if OURS in found:
            table += rows(dtype, found)
    if table:
        print(markdown_table(list(table[0]), [list(map(str, row.values())) for row in table]))
    if args.json:
        write_result(args.json, {"benchmark": "pooling", "notes": notes.lines, "rows": table})
    return 0 if table else 1


if __name__ == "__main__":
    sys.exit(main())
