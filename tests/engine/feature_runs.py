# SPDX-License-Identifier: Apache-2.0
"""One load in engines with many features at once, and what took part in each request.

Five engines for each implementation: a plain one, whose tokens are expected, and the four of
`ENGINES`. The load has a request for each subset of `ASKED`; preemption comes from a small pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import add, check_idle, run_to_the_end, running_engine, tokens_of
from tests.engine.test_speculation import NGRAM, Oracle, drafting
from tests.engine.test_structured import prompt
from tests.engine.witness import Witness
from tests.feature_pairs import Feature

BLOCK, SUB_BLOCK, CHUNK, NEW = 16, 8, 64, 36
SHARED, SHORT, LONG = 28, 31, 141
"""Lengths of the prompts' common beginning, which ends inside a block, and of prompts."""
PATTERN = "[a-d]{20,34}"
COMMON: Mapping[str, Any] = {
    "block_size": BLOCK,
    "max_num_batched_tokens": CHUNK,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
    "structured_outputs_config": {"backend": "xgrammar"},
}
PLAIN: Mapping[str, Any] = {
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 64,
}
POOL = 25
"""24 blocks of 16 and the reserved one; four of the longest requests need 45."""
WAYS: Mapping[Feature, Mapping[str, Any]] = {
    Feature.ASYNC: {},
    Feature.SPECULATION: {"speculative_config": NGRAM},
}
CACHES: Mapping[Feature, Mapping[str, Any]] = {
    Feature.WHOLE_BLOCKS: {},  # the default sub-block is no smaller than the block
    Feature.SUB_BLOCKS: {"additional_config": {"sub_block_size": SUB_BLOCK}},
}
Engine = tuple[Feature, Feature]
ENGINES: tuple[Engine, ...] = tuple(product(WAYS, CACHES))
ASKED = (Feature.SAMPLER, Feature.STRUCTURED, Feature.LORA, Feature.CHUNKS)


@dataclass(frozen=True)
class Asked:
    """A request that asks for some of `ASKED`; ``number`` varies the end of its prompt."""

    number: int
    features: frozenset[Feature]

    @property
    def tokens(self) -> list[int]:
        length = LONG if Feature.CHUNKS in self.features else SHORT
        return [*prompt(SHARED, seed=1), *prompt(length - SHARED, seed=100 + self.number)]

    @property
    def params(self) -> SamplingParams:
        more: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        if Feature.SAMPLER in self.features:
            more |= {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": self.number}
        if Feature.STRUCTURED in self.features:
            grammar = StructuredOutputsParams(regex=PATTERN)
            more |= {"structured_outputs": grammar, "ignore_eos": False}
        return SamplingParams(max_tokens=NEW, **more)

    def without(self, feature: Feature) -> Asked:
        return replace(self, features=self.features - {feature})


LOAD = tuple(
    Asked(number, frozenset(f for f, chosen in zip(ASKED, choice, strict=True) if chosen))
    for number, choice in enumerate(product((False, True), repeat=len(ASKED)))
)
BEFORE = tuple(Asked(100, features) for features in (frozenset(), frozenset([Feature.LORA])))
"""What fills the cache first, for the base model and for the adapter."""


class Misled(Oracle):
    """Its wrong drafts are tokens that the grammar allows: others are dropped unverified."""

    def __init__(self, plain: Mapping[Asked, list[int]]) -> None:
        super().__init__([[*asked.tokens, *tokens] for asked, tokens in plain.items()])
        masked = (plain[asked] for asked in plain if Feature.STRUCTURED in asked.features)
        self._allowed = sorted({token for tokens in masked for token in tokens[:-1]})

    def _damaged(self, token: int) -> int:
        is_wrong = self._random.random() < self._wrong
        return self._random.choice(self._allowed) if is_wrong else token


@dataclass(frozen=True)
class Served:
    """What became of a request in one engine, and what took part in it."""

    asked: Asked
    engine: Engine
    seen: frozenset[Feature]
    tokens: list[int]
    expected: list[int]

    @property
    def concerns(self) -> frozenset[Feature]:
        """What took part or should have: no draft is accepted in a text that has gone wrong."""
        return self.seen | self.asked.features | set(self.engine)


@dataclass
class Runs:
    """The load in every engine of one implementation; each engine runs when it is asked for."""

    implementation: str
    model_dir: Path
    adapter_dir: Path

    @cached_property
    def served(self) -> list[Served]:
        return [item for engine in ENGINES for item in self._served_by(engine)]

    @cached_property
    def plain(self) -> dict[Asked, list[int]]:
        """Tokens of a plain engine: of each request, and of it without sampling or adapter."""
        variants = {
            variant: None
            for asked in LOAD
            for variant in (asked, *map(asked.without, (Feature.SAMPLER, Feature.LORA)))
        }
        with self._engine(PLAIN) as llm:
            outputs = self._answers(llm, list(variants))
        return dict(zip(variants, map(tokens_of, outputs.values()), strict=True))

    def _served_by(self, engine: Engine) -> list[Served]:
        way, cache = engine
        drafter = Misled(self.plain)
        arguments = {**WAYS[way], **CACHES[cache], "num_gpu_blocks_override": POOL}
        with self._engine(arguments) as llm:
            witness = Witness(llm)
            with drafting(llm, drafter) if way is Feature.SPECULATION else nullcontext():
                self._answers(llm, BEFORE)
                with witness.watching():
                    outputs = self._answers(llm, LOAD)
        return [
            self._judge(asked, engine, witness.seen[name], output)
            for asked, (name, output) in zip(LOAD, outputs.items(), strict=True)
        ]

    def _judge(
        self, asked: Asked, engine: Engine, seen: set[Feature], output: RequestOutput
    ) -> Served:
        """Adds what only the answer shows to what was seen in the engine."""
        shown, tokens = set(seen), tokens_of(output)
        if not re.fullmatch(PATTERN, output.outputs[0].text):
            shown.discard(Feature.STRUCTURED)
        for feature in asked.features & {Feature.SAMPLER, Feature.LORA}:
            if tokens != self.plain[asked.without(feature)]:
                shown.add(feature)
        cached = output.num_cached_tokens or 0
        if cached % BLOCK if Feature.SUB_BLOCKS in engine else cached:
            shown.add(engine[1])
        return Served(asked, engine, frozenset(shown), tokens, self.plain[asked])

    def _engine(self, arguments: Mapping[str, Any]) -> AbstractContextManager[LLM]:
        fields = {**COMMON, "model_impl": self.implementation, **arguments}
        return running_engine(self.model_dir, **fields)

    def _answers(self, llm: LLM, load: Sequence[Asked]) -> dict[str, RequestOutput]:
        """The last output of each request by the engine's id for it, in the order of the load."""
        adapter = LoRARequest("adapter", 1, str(self.adapter_dir))
        names = []
        for place, asked in enumerate(load):
            uses = adapter if Feature.LORA in asked.features else None
            names.append(add(llm, str(place), asked.tokens, asked.params, lora_request=uses))
        outputs = run_to_the_end(llm)
        check_idle(llm)
        return {name: outputs[str(place)] for place, name in enumerate(names)}
