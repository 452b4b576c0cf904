# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter, greedy and sampled, with the RBLN sampler and with vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, RequestOutput, SamplingParams

from tests.engine.engines import (
    add,
    all_tokens,
    check_idle,
    counted_preemptions,
    generate,
    prompt,
    recorded_steps,
    run_to_the_end,
    running_engine,
    tokens_of,
)
from tests.oracle import load_model

NEW = 8
POOL = {"block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}
PROCESSOR = "tests.engine.processors:OnlyToken"
SAMPLERS = {"rbln": True, "vllm": False}


@pytest.fixture(scope="module", params=SAMPLERS)
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    """Of both samplers, with a pool that holds four requests of 60 tokens, not eight."""
    options = {"use_custom_sampler": SAMPLERS[request.param]}
    with running_engine(
        tiny_llama_dir,
        max_num_seqs=8,
        num_gpu_blocks_override=31,
        additional_config=options,
        **POOL,
    ) as llm:
        yield llm


def params_of(temperature: float, number: int = NEW, **more: Any) -> SamplingParams:
    seed = {"seed": 21} if temperature else {}
    settings = {"temperature": temperature, "max_tokens": number, "ignore_eos": True, **seed}
    return SamplingParams(**{**settings, **more})


Check = Callable[[RequestOutput, list[int]], bool]
"""Given the output, and the tokens that the request gives without the parameter."""


@dataclass(frozen=True)
class Case:
    """A parameter with what an output of it must be."""

    name: str
    holds: Check
    parameters: dict[str, Any] = field(default_factory=dict)
    from_plain: Callable[[list[int], Any], dict[str, Any]] | None = None
    """Parameters that depend on the tokens that come without."""


def new(output: RequestOutput) -> list[int]:
    return tokens_of(output)


def hardly_twice(output: RequestOutput, _plain: list[int]) -> bool:
    """A penalty makes a token unlikely, not impossible."""
    return len(set(new(output))) >= NEW - 1


def hardly_of_the_prompt(output: RequestOutput, _plain: list[int]) -> bool:
    return len(set(new(output)) & set(output.prompt_token_ids or ())) <= 1


def words_of(tokens: list[int], tokenizer: Any) -> list[str]:
    """The text of those that are that text's one token."""
    texts = [(token, tokenizer.decode([token])) for token in tokens]
    own = [text for token, text in texts if tokenizer.encode(text) == [token]]
    return [text for text in own if text.strip().isalpha()]


CASES = (
    Case("top_k", lambda out, plain: new(out) == plain or len(new(out)) == NEW, {"top_k": 2}),
    Case("top_p", lambda out, plain: len(new(out)) == NEW, {"top_p": 0.5}),
    Case("min_p", lambda out, plain: len(new(out)) == NEW, {"min_p": 0.2}),
    Case("presence_penalty", hardly_twice, {"presence_penalty": 2.0}),
    Case("frequency_penalty", hardly_twice, {"frequency_penalty": 2.0}),
    Case("repetition_penalty", hardly_of_the_prompt, {"repetition_penalty": 50.0}),
    Case("logit_bias", lambda out, plain: new(out) == [77] * NEW, {"logit_bias": {77: 100.0}}),
    Case(
        "allowed_token_ids",
        lambda out, plain: set(new(out)) <= {40, 41},
        {"allowed_token_ids": [40, 41]},
    ),
    Case(
        "min_tokens",
        lambda out, plain: plain[0] not in new(out)[:5] and len(new(out)) >= 5,
        from_plain=lambda plain, _: {"min_tokens": 5, "stop_token_ids": [plain[0]]},
    ),
    Case(
        "bad_words",
        lambda out, plain: new(out) != plain,
        from_plain=lambda plain, tokenizer: {"bad_words": words_of(plain, tokenizer)},
    ),
    Case(
        "logprobs",
        lambda out, plain: (
            new(out) == plain
            and all(t in s for t, s in zip(plain, out.outputs[0].logprobs or (), strict=True))
        ),
        {"logprobs": 2},
    ),
    Case(
        "prompt_logprobs",
        lambda out, plain: (
            new(out) == plain and len(out.prompt_logprobs or ()) == len(out.prompt_token_ids or ())
        ),
        {"prompt_logprobs": 1},
    ),
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_parameter(llm: LLM, tiny_llama_dir: Path, temperature: float) -> None:
    """All in one batch, of which each row gets the same as alone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    prompts = [prompt(9 + i, seed=41) for i in range(len(CASES))]
    plain = all_tokens(generate(llm, prompts, params_of(temperature)))
    parameters = [
        {**case.parameters, **(case.from_plain(tokens, tokenizer) if case.from_plain else {})}
        for case, tokens in zip(CASES, plain, strict=True)
    ]
    params = [params_of(temperature, **one) for one in parameters]
    together = generate(llm, prompts, params)
    for case, output, tokens in zip(CASES, together, plain, strict=True):
        assert case.holds(output, tokens), case.name
    alone = [generate(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert all_tokens(alone) == all_tokens(together)


def test_support_of_each_step(llm: LLM, tiny_llama_dir: Path) -> None:
    """No token from outside top-k, top-p or min-p of a plain forward pass."""
    tokens = prompt(12, seed=42)
    cases: list[dict[str, float]] = [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}]
    params = [params_of(1.0, 6, **case) for case in cases]
    outputs = generate(llm, [tokens] * 3, params)
    model = load_model(tiny_llama_dir, torch.float32)
    for case, output in zip(cases, outputs, strict=True):
        drawn = tokens_of(output)
        with torch.inference_mode():
            logits = model(torch.tensor([[*tokens, *drawn]])).logits[0, len(tokens) - 1 : -1]
        shares = logits.softmax(-1)
        for row, token in zip(shares, drawn, strict=True):
            above = row[row > row[token] * 1.001]
            if "top_k" in case:
                assert above.shape[0] < 3
            elif "top_p" in case:
                assert above.sum() < 0.4
            else:
                assert row[token] > 0.3 * row.max() * 0.999


class TestSeeds:
    def test_alone_in_a_batch_and_again(self, llm: LLM) -> None:
        """Other neighbours, another row and bucket, chunks of the prompt from the cache."""
        tokens, params = prompt(40, seed=43), params_of(1.0, 12)
        results = [tokens_of(generate(llm, [tokens], params)[0])]
        others = [params_of(1.2, 20, seed=None), params_of(0.0, 5, logprobs=1)]
        for around in ([*others, params], [others[0], params, *others, *others], [params]):
            outputs = generate(llm, [tokens if p is params else prompt(9) for p in around], around)
            results.append(tokens_of(outputs[around.index(params)]))
        assert results[1:] == results[:1] * 3

    def test_after_a_preemption(self, llm: LLM) -> None:
        prompts = [prompt(20, seed) for seed in range(8)]
        params = [params_of(1.0, 40, seed=seed) for seed in range(8)]
        alone = [tokens_of(generate(llm, [p], q)[0]) for p, q in zip(prompts, params, strict=True)]
        for number, (tokens, one) in enumerate(zip(prompts, params, strict=True)):
            add(llm, str(number), tokens, one)
        with counted_preemptions(llm):
            outputs = run_to_the_end(llm)
        assert [tokens_of(outputs[str(number)]) for number in range(8)] == alone
        check_idle(llm)

    def test_without_a_seed_tokens_differ(self, llm: LLM) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        outputs = generate(llm, [prompt(9)] * 4, params)
        assert len({tuple(tokens_of(output)) for output in outputs}) == 4


def test_several_that_end_in_one_step(llm: LLM) -> None:
    """Two are cancelled in a step, one arrives; each row's state stays that row's."""
    stops = list(range(256))
    params = [
        params_of(0.0, 24, min_tokens=20, stop_token_ids=stops),
        params_of(0.0, 24, repetition_penalty=2.0),
        params_of(0.9, 24, min_tokens=4, presence_penalty=1.5, stop_token_ids=stops),
        params_of(0.0, 24, logit_bias={99: 3.0}),
        params_of(0.9, 24, frequency_penalty=1.5, allowed_token_ids=[*range(300, 400)]),
    ]
    prompts = [prompt(7 + i, seed=44) for i in range(5)]
    alone = [tokens_of(generate(llm, [p], q)[0]) for p, q in zip(prompts, params, strict=True)]
    for step in (8, 11, 14):
        for number in range(4):
            add(llm, str(number), prompts[number], params[number])

        def change() -> None:
            llm.llm_engine.abort_request(["0", "2"])
            add(llm, "4", prompts[4], params[4])

        outputs = run_to_the_end(llm, {step: change})
        for number in (1, 3, 4):
            assert tokens_of(outputs[str(number)]) == alone[number]
        check_idle(llm)


@dataclass(frozen=True)
class Used:
    """Parameters, and the sampler programs that a step of the RBLN sampler runs for them."""

    params: SamplingParams
    programs: set[str]


USED = (
    Used(params_of(0.0), set()),
    Used(params_of(0.0, min_p=0.1), set()),
    Used(params_of(0.9), {"sampler"}),
    Used(params_of(0.9, top_k=4, top_p=0.9), {"sampler"}),
    Used(params_of(0.9, min_p=0.1), {"draw"}),
    Used(params_of(0.9, logprobs=1), {"draw"}),
    Used(params_of(0.0, presence_penalty=1.0), {"draw"}),
    Used(params_of(0.9, prompt_logprobs=1), {"sampler"}),
)


def test_programs_of_each_path(tiny_llm: LLM) -> None:
    for used in USED:
        with recorded_steps(tiny_llm) as steps:
            generate(tiny_llm, [prompt(9)], used.params)
        kinds = {name.partition("_")[0] for step in steps for name in step.programs}
        assert kinds & {"sampler", "draw"} == used.programs, used.params


class TestOwnProcessor:
    @pytest.fixture(scope="class")
    def llm(self, tiny_llama_dir: Path) -> Iterator[LLM]:
        """Scores are those that tokens are drawn by."""
        with running_engine(
            tiny_llama_dir, logits_processors=[PROCESSOR], logprobs_mode="processed_logprobs"
        ) as llm:
            yield llm

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_it_is_honoured_and_others_go_on(
        self, llm: LLM, tiny_llm: LLM, temperature: float
    ) -> None:
        forced = params_of(temperature, extra_args={"only_token": 123})
        free = params_of(temperature)
        outputs = generate(llm, [prompt(5), prompt(6), prompt(7)], [free, forced, free])
        assert tokens_of(outputs[1]) == [123] * NEW
        expected = generate(tiny_llm, [prompt(5), prompt(7)], free)
        assert all_tokens([outputs[0], outputs[2]]) == all_tokens(expected)

    def test_processed_scores(self, llm: LLM) -> None:
        """Of the two tokens that top-k leaves, and they sum to one."""
        (output,) = generate(llm, [prompt(5)], params_of(0.9, top_k=2, logprobs=3))
        for scores in output.outputs[0].logprobs or ():
            shares = torch.tensor([score.logprob for score in scores.values()]).exp()
            assert int((shares > 0).sum()) == 2
            assert float(shares.sum()) == pytest.approx(1.0, abs=1e-5)
