# SPDX-License-Identifier: Apache-2.0
"""A real server with the tiny model, seen from outside as a client and an operator see it."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.models import ROOT, VOCAB_SIZE
from tests.server_process import ServerProcess, fetch

BLOCK, CHUNK, MAX_LEN, SEQS = 32, 64, 256, 4
MODEL = "tiny"
SIZES: Mapping[str, object] = {
    "--dtype": "float32",
    "--block-size": BLOCK,
    "--max-num-batched-tokens": CHUNK,
    "--max-model-len": MAX_LEN,
    "--max-num-seqs": SEQS,
    "--served-model-name": MODEL,
}
# Lengths at which a granule begins or ends.
EDGES = (1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, MAX_LEN - 8)

# Below are special tokens and single bytes, from here pieces of the licence's ASCII text.
FIRST_WORD = 3 + 256

# Programs are kept between runs; the key covers the code that compiles them.
KEPT_CACHE = ROOT / ".cache" / "server-tests"


def serve_arguments(model_dir: Path, **sizes: object) -> list[str]:
    """The arguments of `rbln-vllm serve` with `SIZES`; `max_num_seqs=1` changes one of them."""
    changed = {f"--{name.replace('_', '-')}": value for name, value in sizes.items()}
    pairs = {**SIZES, **changed}.items()
    return [str(model_dir), *(str(part) for pair in pairs for part in pair)]


def empty_cache_root(directory: Path) -> Path:
    """A cache root without programs, but with what vLLM found out about model classes.

    To find that out takes 10 s.
    """
    known = KEPT_CACHE / "modelinfos"
    known.mkdir(parents=True, exist_ok=True)
    directory.mkdir()
    (directory / known.name).symlink_to(known, target_is_directory=True)
    return directory


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random token ids that are no special tokens and hold whole characters.

    After a prompt that ends within a character vLLM puts the prompt's text before the output's.
    """
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(length)]


def wait_until(condition: Callable[[], bool], what: str, deadline: float = 60.0) -> None:
    """Returns when `condition` holds. Fails, naming `what`, when it does not come to hold."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"after {deadline:.0f} s still not: {what}"
        time.sleep(0.02)


@dataclass(frozen=True)
class Metrics:
    """One reading of /metrics."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        families = text_string_to_metric_families(text)
        return cls(tuple((s.name, s.labels, s.value) for f in families for s in f.samples))

    def __getitem__(self, name: str) -> float:
        """The sum of all samples of `name`. KeyError when there is none."""
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that have `labels`. KeyError when there is none."""
        found = [
            value
            for sample, has, value in self.samples
            if sample == name and labels.items() <= has.items()
        ]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    @property
    def running(self) -> int:
        return int(self["vllm:num_requests_running"])

    @property
    def waiting(self) -> int:
        return int(self["vllm:num_requests_waiting"])

    @property
    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, and no block is held."""
        return (self.running, self.waiting, self["vllm:kv_cache_usage_perc"]) == (0, 0, 0.0)


class LiveServer:
    """A running server with `SIZES`."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.url = process.url
        direct = openai.DefaultHttpxClient(trust_env=False)  # this machine, so through no proxy
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="unused",
            http_client=direct,
            max_retries=0,
            timeout=120,
        )

    def metrics(self) -> Metrics:
        return Metrics.parse(fetch(f"{self.url}/metrics", timeout=30).decode())

    def engine(self) -> psutil.Process:
        """The engine's process."""
        assert self.process.process is not None
        children = psutil.Process(self.process.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in child.name()]
        return engine

    def complete(self, prompt: Any, **more: Any) -> openai.types.Completion:
        """A completion, greedy unless told otherwise, whose choices have `token_ids`.

        What the client does not know, such as `ignore_eos`, is sent too.
        """
        completion = self.client.completions.create(**_split(prompt, more))
        assert isinstance(completion, openai.types.Completion)
        return completion

    def stream(self, prompt: Any, **more: Any) -> Iterator[openai.types.Completion]:
        """The same, streamed."""
        chunks = self.client.completions.create(**_split(prompt, more), stream=True)
        assert isinstance(chunks, openai.Stream)
        yield from chunks

    def tokens(self, prompt: Any, max_tokens: int) -> list[int]:
        """Exactly `max_tokens` greedy tokens."""
        completion = self.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
        return token_ids(completion.choices[0])

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.metrics().is_idle, "the engine idle, without a block held")


# What the client takes; all else is vLLM's own.
_KNOWN = {"model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "echo", "logprobs"}
_KNOWN |= {"stream_options", "logit_bias", "extra_headers"}


def _split(prompt: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the client, and in `extra_body` those only vLLM knows."""
    known = {name: value for name, value in more.items() if name in _KNOWN}
    extra = {name: value for name, value in more.items() if name not in _KNOWN}
    body = {"return_token_ids": True, **extra}
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **known, "extra_body": body}


def token_ids(choice: Any) -> list[int]:
    """vLLM's `token_ids` of a choice, which the client's types do not name."""
    return list(choice.token_ids or ())


def joined_text(chunks: Sequence[openai.types.Completion], index: int = 0) -> str:
    """The text of one choice of a streamed completion."""
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


@contextmanager
def running_server(
    arguments: Sequence[str], log_file: Path, cache_root: Path = KEPT_CACHE, **variables: str
) -> Iterator[LiveServer]:
    """A server for the time of the block, with the kept programs unless told otherwise."""
    environment = {**server_environment(cache_root), **variables}
    with ServerProcess(arguments, log_file=log_file, env=environment) as process:
        yield LiveServer(process)


def server_environment(cache_root: Path) -> dict[str, str]:
    """What every server of these tests is told."""
    return {
        "VLLM_CACHE_ROOT": str(cache_root),
        "VLLM_LOGGING_LEVEL": "INFO",
        "RBLN_GRAMMAR_SECONDS": "4",
    }


class MissedError(AssertionError):
    """What a test waited for did not come, or passed between two looks."""


def tried_again_when_missed(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test up to three times: on a busy machine a pulse may last many steps."""

    @functools.wraps(test)
    def attempts(*arguments: Any, **named: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(MissedError):
                return test(*arguments, **named)
        return test(*arguments, **named)

    return attempts


class Brake:
    """Stops the engine process while the block lasts, but for pulses.

    A step of the tiny model takes milliseconds: between pulses a test can look where a request is,
    and act before the next step.
    """

    PULSE_S = 0.002
    SETTLE_S = 0.02
    PULSES = 400

    def __init__(self, server: LiveServer) -> None:
        self._server, self._engine = server, server.engine().pid

    def __enter__(self) -> Brake:
        os.kill(self._engine, signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the engine run from now on."""
        os.kill(self._engine, signal.SIGCONT)

    def settle(self) -> None:
        """Let the API server take in what the engine sent, and tell it what clients did."""
        time.sleep(self.SETTLE_S)

    def pulse(self) -> None:
        """Let the engine run for a step or two.

        Awake: on a busy machine a sleep ends many steps too late.
        """
        end = time.perf_counter() + self.PULSE_S
        os.kill(self._engine, signal.SIGCONT)
        while time.perf_counter() < end:
            pass
        os.kill(self._engine, signal.SIGSTOP)
        self.settle()

    def advance_until(self, condition: Callable[[Metrics], bool], what: str) -> Metrics:
        """Pulses until a reading of /metrics meets `condition`. MissedError when none does."""
        for _ in range(self.PULSES):
            metrics = self._server.metrics()
            if condition(metrics):
                return metrics
            self.pulse()
        raise MissedError(f"after {self.PULSES} pulses still not: {what}; {metrics.running=}")
