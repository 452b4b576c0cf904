# SPDX-License-Identifier: Apache-2.0
"""What is measured: a probe asks one engine for one figure, once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchmarks.costs import ModelShape, Work


class Answers(Protocol):
    """The part of a driver that a probe needs."""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command of `engines.protocol`."""
        ...


class Probe(Protocol):
    """One figure."""

    @property
    def name(self) -> str:
        """Key of the figure in results."""
        ...

    @property
    def label(self) -> str:
        """The figure and its unit, for people."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether the figure is a rate (else a time)."""
        ...

    def warm_up(self, engine: Answers) -> None:
        """Have everything compiled and allocated that measuring needs."""
        ...

    def measure(self, engine: Answers) -> float:
        """The figure, once."""
        ...

    def work(self, shape: ModelShape) -> Work:
        """What an engine must at least do for it."""
        ...


@dataclass(frozen=True)
class DecodeStep:
    """Milliseconds of a decode step of `batch` sequences.

    (time of N tokens - time of 1 token) / (N - 1), so that reading the prompts is not in it.
    """

    batch: int
    tokens_in: int = 128
    tokens_out: int = 128
    higher_is_better: bool = False

    @property
    def name(self) -> str:
        return f"decode_b{self.batch}"

    @property
    def label(self) -> str:
        return f"decode step, batch {self.batch} (ms)"

    def warm_up(self, engine: Answers) -> None:
        """A few steps."""
        self._seconds(engine, 4)

    def measure(self, engine: Answers) -> float:
        """Milliseconds; on a disturbed machine the difference can even be negative."""
        first = self._seconds(engine, 1)
        return (self._seconds(engine, self.tokens_out) - first) / (self.tokens_out - 1) * 1e3

    def work(self, shape: ModelShape) -> Work:
        """Weights and KV cache read once, at the mean context of the steps."""
        return shape.decode_work(self.batch, self.tokens_in + self.tokens_out / 2)

    def _seconds(self, engine: Answers, tokens_out: int) -> float:
        answer = engine.ask(
            "run", batch=self.batch, tokens_in=self.tokens_in, tokens_out=tokens_out
        )
        return float(answer["seconds"])


@dataclass(frozen=True)
class Prefill:
    """Tokens per second of one prompt, until its first new token."""

    tokens: int = 1024
    higher_is_better: bool = True

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}"

    @property
    def label(self) -> str:
        return f"prefill, {self.tokens:,} tokens (tok/s)"

    def warm_up(self, engine: Answers) -> None:
        """One prompt."""
        self.measure(engine)

    def measure(self, engine: Answers) -> float:
        """Tokens per second."""
        answer = engine.ask("run", batch=1, tokens_in=self.tokens, tokens_out=1)
        return self.tokens / float(answer["seconds"])

    def work(self, shape: ModelShape) -> Work:
        """All matrices read once, all operations of the prompt."""
        return shape.prefill_work(self.tokens)


@dataclass(frozen=True)
class ContextStep:
    """Milliseconds of a decode step of one sequence after a prompt of `tokens_in` tokens."""

    tokens_in: int
    tokens_out: int = 33
    higher_is_better: bool = False

    @property
    def name(self) -> str:
        return f"context_{self.tokens_in}"

    @property
    def label(self) -> str:
        return f"decode step, batch 1, context {self.tokens_in:,} (ms)"

    def warm_up(self, engine: Answers) -> None:
        """A few steps after the whole prompt."""
        engine.ask("steps", tokens_in=self.tokens_in, tokens_out=3)

    def measure(self, engine: Answers) -> float:
        """Milliseconds, from the first new token to the last."""
        answer = engine.ask("steps", tokens_in=self.tokens_in, tokens_out=self.tokens_out)
        return float(answer["seconds_per_step"]) * 1e3

    def work(self, shape: ModelShape) -> Work:
        """Weights and KV cache read once."""
        return shape.decode_work(1, self.tokens_in + self.tokens_out / 2)


def describe(probe: Probe, shape: ModelShape) -> dict[str, Any]:
    """What the figures of a probe need to be read without this program."""
    return {
        "name": probe.name,
        "label": probe.label,
        "higher_is_better": probe.higher_is_better,
        **asdict(probe.work(shape)),
    }
