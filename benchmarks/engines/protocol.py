# SPDX-License-Identifier: Apache-2.0
"""What the driver of every system speaks with the benchmark: one JSON object a line.

A driver is started as `python -m benchmarks.engines.NAME SETTINGS_JSON` in the environment of its
system, so this file needs the standard library only. It starts its engine, says so in one line,
and then answers commands until its input ends:

    run   {batch, tokens_in, tokens_out}             -> {seconds}
    steps {tokens_in, tokens_out}                    -> {seconds_per_step}
    loop  {batch, tokens_in, tokens_out, seconds}    -> {tokens, seconds}

An engine that embeds has one command in place of these:

    embed {texts, shown}                             -> {seconds, tokens, vectors}

The engines' own printing goes to standard error. Between commands the benchmark stops all
processes of a driver (SIGSTOP): an idle engine takes nothing from the one that is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TextIO

# Token ids that every model here has and none treats as special.
FIRST_TOKEN, LAST_TOKEN = 100, 40_000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """What every engine is started with.

    `model` is a directory or file in the system's own format; `max_model_len` counts tokens,
    `kv_gib` is the size of the KV cache.
    """

    model: str
    max_model_len: int
    max_num_seqs: int
    kv_gib: int

    def __post_init__(self) -> None:
        if min(self.max_model_len, self.max_num_seqs, self.kv_gib) < 1:
            raise ValueError(f"sizes must be at least 1: {self}")

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


class Engine(Protocol):
    """A started engine with greedy sampling, no prefix cache and end-of-text ignored."""

    def run(self, batch: int, tokens_in: int, tokens_out: int) -> float:
        """Seconds until `batch` prompts of `tokens_in` tokens have each `tokens_out` more."""
        ...

    def steps(self, tokens_in: int, tokens_out: int) -> float:
        """Seconds per decode step of one sequence, between its first token and its last."""
        ...


class Embedder(Protocol):
    """A started engine that embeds texts, each by a normalised vector."""

    def embed(self, texts: list[str], shown: int) -> dict[str, Any]:
        """Seconds for all texts, their tokens, and the vectors of the first `shown`."""
        ...


# Starts an engine; the second result is what to tell about it: precision, platform, settings.
Start = Callable[[Settings], tuple[Engine | Embedder, dict[str, Any]]]


def random_prompt(tokens: int) -> list[int]:
    """Token ids that no other prompt shares."""
    return random.choices(range(FIRST_TOKEN, LAST_TOKEN), k=tokens)


def package_versions(*names: str) -> dict[str, str]:
    """Releases of the distributions that are installed among `names`."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def serve(start: Start) -> None:
    """Start the engine, then answer commands from standard input until it ends."""
    began = time.perf_counter()
    answers = _reserve_stdout()
    random.seed(0)
    _continue_when_parent_dies()
    engine, about = start(Settings.from_json(sys.argv[1]))
    _answer(answers, {"ready": True, "driver_seconds": time.perf_counter() - began, **about})
    for line in sys.stdin:
        command = json.loads(line)
        _answer(answers, execute(engine, command.pop("command"), command))
    # Whatever the engine started may still be stopped, and must run to end in order.
    os.killpg(0, signal.SIGCONT)


def execute(engine: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command. Raises ValueError for a name that is none."""
    if name == "embed":
        return dict(engine.embed(**arguments))
    if name == "run":
        return {"seconds": engine.run(**arguments)}
    if name == "steps":
        return {"seconds_per_step": engine.steps(**arguments)}
    if name == "loop":
        return _loop(engine, **arguments)
    raise ValueError(f"no command {name!r}: use run, steps, loop or embed")


def _loop(
    engine: Engine, batch: int, tokens_in: int, tokens_out: int, seconds: float
) -> dict[str, Any]:
    """Run again and again until `seconds` have passed."""
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        engine.run(batch, tokens_in, tokens_out)
        tokens += batch * tokens_out
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _reserve_stdout() -> TextIO:
    """The real standard output; what engines and their processes print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _continue_when_parent_dies() -> None:
    """A stopped driver whose benchmark was killed wakes up, reads the end of input, and ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
