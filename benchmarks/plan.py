# SPDX-License-Identifier: Apache-2.0
"""What a run measures: all of it, or as little as shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.probes import ContextStep, DecodeStep, Prefill, Probe


@dataclass(frozen=True)
class Sizes:
    """Limits of an engine, in tokens, sequences and GiB."""

    max_model_len: int
    max_num_seqs: int
    kv_gib: int = 2


# The first row of figures is that of vLLM's and OpenVINO's own examples: short prompts, 2,048
# tokens at most. A long context gets an engine of its own, since its limit costs every engine.
SMALL, CONTEXT, LARGE = Sizes(2048, 32), Sizes(8192, 1), Sizes(8192, 8)


@dataclass(frozen=True)
class Plan:
    """Probes of each section, load over HTTP, and seconds of a sharing measurement.

    `rounds` is for the main section; the others take half as many.
    """

    rounds: int
    small: tuple[Probe, ...]
    context: tuple[Probe, ...]
    large: tuple[Probe, ...]
    concurrency: tuple[int, ...]
    requests_per_place: int
    sharing_seconds: float

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError("rounds must be at least 1")

    @property
    def fewer_rounds(self) -> int:
        return (self.rounds + 1) // 2


def full(rounds: int) -> Plan:
    """Every figure of the results page. 8,128 tokens and what follows fit in 8,192 positions."""
    contexts = (128, 1024, 2048, 4096, 8128)
    return Plan(
        rounds=rounds,
        small=(DecodeStep(1), DecodeStep(8), DecodeStep(32), Prefill()),
        context=tuple(ContextStep(tokens) for tokens in contexts),
        large=(
            DecodeStep(1, tokens_out=48),
            DecodeStep(8, tokens_out=48),
            ContextStep(128),
            ContextStep(2048),
        ),
        concurrency=(1, 8, 32),
        requests_per_place=4,
        sharing_seconds=15.0,
    )


def quick(rounds: int) -> Plan:
    """The same parts with hardly any tokens: figures mean nothing."""
    return Plan(
        rounds=rounds,
        small=(DecodeStep(1, 16, 8), DecodeStep(8, 16, 8), Prefill(256)),
        context=(ContextStep(128, 9), ContextStep(512, 9)),
        large=(DecodeStep(1, 16, 4), ContextStep(128, 5), ContextStep(256, 5)),
        concurrency=(1, 4),
        requests_per_place=2,
        sharing_seconds=3.0,
    )
