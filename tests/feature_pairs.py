# SPDX-License-Identifier: Apache-2.0
"""Which features of decoding are served together: the data of docs/features.md and of its tests.

tests/engine/test_feature_pairs.py has one test for each implementation and pair of features that
is not exclusive; scripts/feature_table.py runs them and writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

IMPLEMENTATIONS = ("vllm", "transformers")


class Feature(StrEnum):
    SAMPLER = "sampler"
    STRUCTURED = "structured output"
    ASYNC = "async scheduling"
    SPECULATION = "speculation"
    LORA = "LoRA"
    WHOLE_BLOCKS = "prefix cache by whole blocks"
    SUB_BLOCKS = "prefix cache by sub-blocks"
    CHUNKS = "chunked prefill"
    PREEMPTION = "preemption"


Pair = frozenset[Feature]

EVIDENCE: Mapping[Feature, tuple[str, str]] = {
    Feature.SAMPLER: (
        "`temperature`, `top_k`, `top_p` and `seed` of the request",
        "its tokens are not those of greedy sampling",
    ),
    Feature.STRUCTURED: (
        "a regular expression of the request, through xgrammar",
        "its rows were masked, and its text matches",
    ),
    Feature.ASYNC: (
        "vLLM's default",
        "a step of it was scheduled before its token of the step before was known",
    ),
    Feature.SPECULATION: (
        "`--speculative-config`; drafts of up to 4 tokens, some of them wrong",
        "drafts of it were accepted, and others rejected",
    ),
    Feature.LORA: (
        "`--enable-lora`; an adapter of all linears of the layers",
        "its tokens are not those of the base model",
    ),
    Feature.WHOLE_BLOCKS: (
        "a block that is no larger than the default sub-block",
        "tokens of its prompt were found in the cache",
    ),
    Feature.SUB_BLOCKS: (
        "`--rbln-sub-block-size`, half a block",
        "the tokens found in the cache ended inside a block",
    ),
    Feature.CHUNKS: (
        "a prompt of several times `--max-num-batched-tokens`",
        "at least two steps computed its prompt",
    ),
    Feature.PREEMPTION: (
        "a pool too small for the requests that run",
        "it lost its blocks and went on later",
    ),
}
"""How each feature is asked for, and what shows that it took part in a request."""

EXCLUSIVE: Mapping[Pair, str] = {
    frozenset((Feature.ASYNC, Feature.SPECULATION)): (
        "the drafts of a step are known only when the one before has been sampled: with "
        "speculation asynchronous scheduling is switched off, with a warning"
    ),
    frozenset((Feature.WHOLE_BLOCKS, Feature.SUB_BLOCKS)): (
        "an engine caches prefixes by the one or by the other"
    ),
}
"""Pairs that cannot meet in a request, and why."""


@dataclass(frozen=True)
class Cell:
    """A pair of features under one model implementation, in the order of `Feature`."""

    implementation: str
    first: Feature
    second: Feature

    def __str__(self) -> str:
        return f"{self.implementation}: {self.first} x {self.second}"

    @property
    def pair(self) -> Pair:
        return frozenset((self.first, self.second))


FAULTS: Mapping[Cell, str] = {}
"""Cells that are known to fail, and what fails."""


def cells() -> Iterator[Cell]:
    """Every cell that can be tested."""
    for implementation in IMPLEMENTATIONS:
        for first, second in combinations(Feature, 2):
            if frozenset((first, second)) not in EXCLUSIVE:
                yield Cell(implementation, first, second)
