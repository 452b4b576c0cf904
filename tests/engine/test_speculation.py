# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding changes how many tokens a step gives, and nothing that comes out.

An oracle drafts from what the same engine answered without drafts, and damages some of it: so
drafts are accepted and rejected in all numbers. A tiny random model repeats too little for n-grams.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter as CounterMetric
from vllm.v1.metrics.reader import Vector

from rbln_vllm.core.step import StepKind
from rbln_vllm.worker.speculation.drafters import DraftStep, HostDrafter
from tests.engine.engines import (
    check_idle,
    counted_preemptions,
    generate,
    greedy,
    prompt,
    recorded_steps,
    runner_of,
    running_engine,
    tokens_of,
)
from tests.engine.test_async_scheduling import SCHEMA, Load, constrained, sampled, seen
from tests.engine.test_structured import FIRST_WORD
from tests.models import VOCAB_SIZE
from tests.oracle import hf_greedy

DRAFTS = 4
MAX_LEN, CHUNK, BLOCK = 256, 64, 8
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
ARGUMENTS: dict[str, Any] = {
    "block_size": BLOCK,
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
    "disable_log_stats": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


LENGTHS = (5, 2 * CHUNK + 9, CHUNK, BLOCK - 1, 1, CHUNK + 1)


def load(*params: SamplingParams, every: int = 0, seed: int = 41) -> Load:
    """One request for each of the parameters, of several lengths, ``every`` so many steps."""
    requests = [
        (prompt(LENGTHS[i % len(LENGTHS)], seed=seed + i), item) for i, item in enumerate(params)
    ]
    return Load(requests, {i: every * i for i in range(len(params))})


class Oracle(HostDrafter):
    """Drafts what comes next in the texts it is given, wrong every fourth time."""

    num_speculative_tokens = DRAFTS

    def __init__(self, texts: Sequence[Sequence[int]] = (), wrong: float = 0.25) -> None:
        self._texts = [list(text) for text in texts]
        self._random, self._wrong = random.Random(7), wrong
        self.drafted = 0
        self.lengths: set[int] = set()

    def propose(self, step: DraftStep) -> list[list[int]]:
        drafts = [self._draft(step, row) for row in range(step.num_rows)]
        self.drafted += sum(map(len, drafts))
        self.lengths.update(map(len, drafts))
        return drafts

    def _draft(self, step: DraftStep, row: int) -> list[int]:
        if not step.sampled_B[row]:
            return []
        known = step.tokens_BL[row, : step.lengths_B[row]].tolist()
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        count = self._random.randrange(1, DRAFTS + 1)
        return [self._damaged(token) for token in text[len(known) :][:count]]

    def _damaged(self, token: int) -> int:
        return 300 if self._random.random() < self._wrong else token


class Scripted(Oracle):
    """Drafts so many tokens of a text where it has a certain length; some are wrong."""

    def __init__(self, text: list[int], counts: Mapping[int, int], wrong: set[int]) -> None:
        super().__init__([text])
        self._text, self._counts, self._wrong_at = text, counts, wrong

    def _draft(self, step: DraftStep, row: int) -> list[int]:
        known = int(step.lengths_B[row])
        places = range(known, known + self._counts.get(known, 0))
        return [(self._text[at] + (at in self._wrong_at)) % 512 for at in places]


@contextmanager
def drafting(llm: LLM, drafter: Oracle) -> Iterator[None]:
    runner = runner_of(llm)
    before, runner.speculation = runner.speculation, drafter
    try:
        yield
    finally:
        runner.speculation = before


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    with running_engine(
        tiny_llama_dir, model_impl=request.param, speculative_config=NGRAM, **ARGUMENTS
    ) as engine:
        yield engine


def texts_of(outputs: Sequence[RequestOutput | None]) -> list[list[int]]:
    """Prompt and tokens of every completion."""
    return [
        [*(output.prompt_token_ids or ()), *completion.token_ids]
        for output in outputs
        if output is not None
        for completion in output.outputs
    ]


def compare(llm: LLM, requests: Load) -> tuple[list[RequestOutput | None], Oracle]:
    """The outputs with drafts, which must be those without."""
    llm.reset_prefix_cache()
    with drafting(llm, Oracle()):
        plain = requests.run(llm)
    llm.reset_prefix_cache()
    oracle = Oracle(texts_of(plain))
    with drafting(llm, oracle):
        drafted = requests.run(llm)
    assert [seen(output) for output in drafted] == [seen(output) for output in plain]
    assert oracle.drafted, "nothing was drafted"
    return drafted, oracle


LOADS: dict[str, Load] = {
    "greedy": load(*[greedy(12 + i) for i in range(6)]),
    "arriving": load(*[greedy(20) for _ in range(6)], every=3),
    "a few tokens": load(*[greedy(n) for n in (1, 2, 3, 4, 5, 6)]),
    "to the longest": Load([(prompt(MAX_LEN - n, seed=n), greedy(12)) for n in (1, 2, 3, 6, 12)]),
    "seeds": load(*[sampled(seed=i, top_k=20, top_p=0.9) for i in range(6)], every=2),
    "two of each": load(
        *[sampled(seed=i, n=2, output_kind=RequestOutputKind.FINAL_ONLY) for i in range(3)]
    ),
    "penalties": load(
        sampled(seed=1, repetition_penalty=1.7),
        greedy(30, frequency_penalty=1.5),
        greedy(30, presence_penalty=2.0),
        greedy(30, min_tokens=12, stop_token_ids=list(range(256))),
        greedy(12, allowed_token_ids=[100, 101, 102]),
        greedy(30, bad_words=["e", "th"]),
        greedy(12),
        every=2,
    ),
    "biases": load(
        greedy(12, logit_bias={5: 100.0, 9: -100.0}),
        greedy(12),
        greedy(20, logit_bias={token: -100.0 for token in range(3, 200)}),
        sampled(seed=6, logit_bias={7: 3.0}),
        every=2,
    ),
    "min_p": load(
        sampled(seed=1, min_p=0.3),
        sampled(seed=2),
        sampled(seed=3, min_p=1.0),
        greedy(12, min_p=0.5),
        sampled(seed=4, min_p=0.05, top_k=20, presence_penalty=1.0),
        every=2,
    ),
    "logprobs": load(
        greedy(12, logprobs=3), greedy(12, prompt_logprobs=2), sampled(seed=3, logprobs=0)
    ),
    "stop": load(
        SamplingParams(temperature=0.0, max_tokens=40, stop=["e", "th"]),
        SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=list(range(3, 120))),
        greedy(25),
        every=4,
    ),
    "structured": load(
        constrained(json=SCHEMA),
        greedy(15),
        constrained(regex="[a-c]{3}-[0-9]{2}", temperature=1.0),
        constrained(choice=["positive", "negative"]),
        constrained(6, json=SCHEMA),
        sampled(seed=4),
        every=2,
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_the_same_as_without_drafts(llm: LLM, name: str) -> None:
    compare(llm, LOADS[name])


def test_greedy_text_is_the_models(llm: LLM, tiny_llama_dir: Path) -> None:
    tokens = prompt(21)
    want = hf_greedy(tiny_llama_dir, [tokens], 24)[0].token_ids
    with drafting(llm, Oracle([[*tokens, *want]])):
        (output,) = generate(llm, [tokens], greedy(24))
    assert tokens_of(output) == want


def test_fewer_steps_of_longer_rows(llm: LLM) -> None:
    tokens, new = prompt(9), 21
    with drafting(llm, Oracle()), recorded_steps(llm) as plain:
        (output,) = generate(llm, [tokens], greedy(new))
    always = dict.fromkeys((10, 15, 20, 25), DRAFTS)
    with (
        drafting(llm, Scripted(texts_of([output])[0], always, set())),
        recorded_steps(llm) as drafted,
    ):
        generate(llm, [tokens], greedy(new))
    assert [step.forward for step in plain[1:]] == ["decode_b1_q1"] * (new - 1)
    # The first token comes from the prefill; then five a step.
    assert [step.forward for step in drafted[1:]] == ["decode_b1_q5"] * 4
    samplers = {name for step in drafted for name in step.programs if "sampler" in name}
    assert not samplers, "greedy rows take the logits program's own choice"


def test_ngrams_of_the_prompt_are_found(llm: LLM) -> None:
    """vLLM's own search, on a prompt that repeats itself: most drafts are wrong here."""
    before = counts_of(llm)
    tokens = prompt(8) * 5
    with drafting(llm, Oracle()):
        (plain,) = generate(llm, [tokens], greedy(30))
    (drafted,) = generate(llm, [tokens], greedy(30))
    assert tokens_of(drafted) == tokens_of(plain)
    assert counts_of(llm)["drafts"] > before["drafts"]


def test_suffixes_are_found(tiny_llama_dir: Path) -> None:
    """Arctic Inference's trees: the second request of a text has the first one's output."""
    pytest.importorskip("arctic_inference")
    config = {"method": "suffix", "num_speculative_tokens": DRAFTS}
    with running_engine(tiny_llama_dir, speculative_config=config, **ARGUMENTS) as llm:
        with drafting(llm, Oracle()), recorded_steps(llm) as plain:
            (without,) = generate(llm, [prompt(9)], greedy(30))
        generate(llm, [prompt(9)], greedy(30))
        with recorded_steps(llm) as drafted:
            (again,) = generate(llm, [prompt(9)], greedy(30))
        assert tokens_of(again) == tokens_of(without)
        assert len(drafted) < len(plain) / 2
        check_idle(llm)


def test_preempted_requests_go_on(llm: LLM) -> None:
    requests = load(*[greedy(70) for _ in range(4)], seed=90)
    with counted_preemptions(llm):
        compare(llm, requests)


@pytest.mark.parametrize("step", range(0, 12, 2))
def test_an_abort_leaves_the_others(llm: LLM, step: int) -> None:
    requests = load(*[greedy(16) for _ in range(4)], seed=17)
    with drafting(llm, Oracle()):
        plain = requests.run(llm)
    with drafting(llm, Oracle(texts_of(plain))):
        outputs = requests.run(llm, abort={step: 1})
    for number in (0, 2, 3):
        assert seen(outputs[number]) == seen(plain[number])


def test_prefixes_are_hit_within_blocks(llm: LLM) -> None:
    """What rejected drafts wrote is no part of a prefix."""
    tokens = prompt(13, seed=5)
    llm.reset_prefix_cache()
    with drafting(llm, Oracle()):
        (plain,) = generate(llm, [tokens], greedy(30))
        longer = [*tokens, *tokens_of(plain)]
        (after_plain,) = generate(llm, [longer], greedy(10))
        llm.reset_prefix_cache()
    with drafting(llm, Oracle(texts_of([plain, after_plain]), wrong=0.5)):
        generate(llm, [tokens], greedy(30))
        (after_drafts,) = generate(llm, [longer], greedy(10))
    assert tokens_of(after_drafts) == tokens_of(after_plain)
    assert after_drafts.num_cached_tokens == after_plain.num_cached_tokens > 0
    check_idle(llm)


def test_thirty_objects_at_once(llm: LLM) -> None:
    """Every output obeys its schema, whatever is drafted against it."""
    words = [random.Random(i).choices(range(FIRST_WORD, VOCAB_SIZE), k=3 + i) for i in range(30)]
    requests = Load([(tokens, constrained(json=SCHEMA)) for tokens in words])
    outputs, _ = compare(llm, requests)
    for output in outputs:
        assert output is not None
        assert set(json.loads(output.outputs[0].text)) == {"ok", "kind"}


def counts_of(llm: LLM) -> dict[str, int]:
    """vLLM's counters of drafts."""
    prefix, counts = "vllm:spec_decode_num_", {}
    for metric in llm.get_metrics():
        if isinstance(metric, CounterMetric) and metric.name.startswith(prefix):
            counts[metric.name.removeprefix(prefix)] = metric.value
        if isinstance(metric, Vector) and metric.name.startswith(prefix):
            for position, value in enumerate(metric.values):
                counts[f"at_{position}"] = value
    return counts


def test_metrics_count_drafts(llm: LLM) -> None:
    """One prompt, all drafts right but the last of the second step."""
    tokens = prompt(11, seed=8)
    with drafting(llm, Oracle()):
        (plain,) = generate(llm, [tokens], greedy(12))
    text = texts_of([plain])[0]
    before = counts_of(llm)
    with drafting(llm, Scripted(text, {12: 3, 16: 4}, wrong={19})):
        (drafted,) = generate(llm, [tokens], greedy(12))
    assert tokens_of(drafted) == tokens_of(plain)
    after = counts_of(llm)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained == {
        "drafts": 2,
        "draft_tokens": 7,
        "accepted_tokens": 6,
        **{f"at_{position}": count for position, count in enumerate((2, 2, 2, 0))},
    }


OWN = {
    "OnlyOwn": "A request that asks for it gets no drafts; others do.",
    "OnlyToken": "Nobody knows which rows it changes, so nobody gets drafts.",
}


@pytest.mark.parametrize("name", OWN)
def test_a_processor_of_ones_own(tiny_llama_dir: Path, name: str) -> None:
    processors = [f"tests.engine.processors:{name}"]
    with running_engine(
        tiny_llama_dir, speculative_config=NGRAM, logits_processors=processors, **ARGUMENTS
    ) as llm:
        asked = {"extra_args": {"only_token": 123}}
        requests = load(greedy(12, **asked), greedy(12), sampled(seed=2, **asked), sampled(seed=3))
        with drafting(llm, Oracle()):
            plain = requests.run(llm)
        with drafting(llm, Oracle(texts_of(plain), wrong=0.0)), recorded_steps(llm) as steps:
            drafted = requests.run(llm)
        assert [seen(output) for output in drafted] == [seen(output) for output in plain]
        for number in (0, 2):
            assert drafted[number] is not None
            assert set(tokens_of(drafted[number])) == {123}
        rows = [
            (request_id.partition("-")[0], tokens)
            for step in steps
            if step.plan.kind is StepKind.DECODE
            for request_id, tokens in zip(step.plan.request_ids, step.plan.tokens, strict=True)
        ]
        assert all(tokens == 1 for request, tokens in rows if request in ("0", "2"))
        assert any(tokens > 1 for _, tokens in rows) == (name == "OnlyOwn")
