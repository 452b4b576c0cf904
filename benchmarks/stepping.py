# SPDX-License-Identifier: Apache-2.0
"""Drive an engine step by step in this process and note when each token came."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from vllm import LLM, SamplingParams


@dataclass
class Trace:
    """Seconds: when each request was added, and when each of its tokens came."""

    added: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time_to_first(self, request: str) -> float:
        return self.tokens[request][0] - self.added[request]

    def gaps(self, request: str) -> list[float]:
        """Time between tokens that follow one another."""
        times = self.tokens[request]
        return [later - earlier for earlier, later in pairwise(times)]


def random_prompt(rng: np.random.Generator, tokens: int) -> list[int]:
    """Token ids no other prompt shares, so that nothing hits the prefix cache."""
    return [int(token) for token in rng.integers(100, 40_000, tokens)]


class Stepper:
    """One engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.trace = Trace()

    def add(self, request: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.trace.added[request] = time.perf_counter()
        self.engine.add_request(request, {"prompt_token_ids": list(prompt)}, params)

    def run(self, before_step: Callable[[int], None] = lambda step: None) -> Trace:
        """Step until nothing is left; ``before_step`` may add requests."""
        step, seen = 0, defaultdict[str, int](int)
        while True:
            before_step(step)
            if not self.engine.has_unfinished_requests():
                return self.trace
            for output in self.engine.step():
                count = len(output.outputs[0].token_ids)
                if count > seen[output.request_id]:
                    seen[output.request_id] = count
                    self.trace.tokens[output.request_id].append(time.perf_counter())
            step += 1
