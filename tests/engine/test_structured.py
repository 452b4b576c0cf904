# SPDX-License-Identifier: Apache-2.0
"""Structured output beside everything else: each output obeys its own grammar, others none."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import (
    CHUNK,
    add,
    check_idle,
    counted_preemptions,
    generate,
    greedy,
    recorded_steps,
    run_to_the_end,
    running_engine,
    tokens_of,
)
from tests.models import VOCAB_SIZE

BACKENDS = ("xgrammar", "guidance")
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["count"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "regex", "pattern": "[0-9]{3}"},
        "end": "</n>",
    },
}
EBNF = 'root ::= "x" digit digit\ndigit ::= [0-9]'
LARK = 'start: "x" DIGIT DIGIT\nDIGIT: /[0-9]/'
POOL = {"block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}


FIRST_WORD = 259
"""Below are special tokens and single bytes."""


def prompt(length: int, seed: int = 0) -> list[int]:
    """Whole characters: behind others vLLM gives the prompt's text with the output's."""
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(length)]


def constrained(max_tokens: int = 60, temperature: float = 0.0, **kind: Any) -> SamplingParams:
    more = {"stop": kind.pop("stop", None), "seed": kind.pop("seed", None)}
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**kind),
        **{name: value for name, value in more.items() if value is not None},
    )


def text_of(output: RequestOutput) -> str:
    assert output.outputs[0].finish_reason == "stop"
    return str(output.outputs[0].text)


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    """A pool that holds four requests of 60 tokens, not eight."""
    settings = {"backend": request.param, "disable_any_whitespace": True}
    with running_engine(
        tiny_llama_dir,
        max_num_seqs=8,
        num_gpu_blocks_override=31,
        structured_outputs_config=settings,
        **POOL,
    ) as llm:
        yield llm


def is_guidance(llm: LLM) -> bool:
    config = llm.llm_engine.vllm_config.structured_outputs_config
    return bool(config.backend == "guidance")


class TestKinds:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_each(self, llm: LLM, temperature: float) -> None:
        """All in one batch: JSON schema, JSON object, regex, grammar, choice, structural tag."""
        grammar = LARK if is_guidance(llm) else EBNF
        kinds: list[dict[str, Any]] = [
            {"json": SCHEMA},
            {"regex": "[a-c]{3}-[0-9]{2}"},
            {"grammar": grammar},
            {"choice": ["positive", "negative"]},
        ]
        if not is_guidance(llm):
            kinds.append({"structural_tag": json.dumps(TAGS)})
        params = [constrained(temperature=temperature, seed=3, **kind) for kind in kinds]
        outputs = generate(llm, [prompt(9 + i) for i in range(len(kinds))], params)
        texts = [text_of(output) for output in outputs]
        assert json.loads(texts[0])["count"] in range(10)
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", texts[1])
        assert re.fullmatch("x[0-9]{2}", texts[2])
        assert texts[3] in ("positive", "negative")
        assert all(re.fullmatch("<n>[0-9]{3}</n>", text) for text in texts[4:])

    def test_json_object(self, llm: LLM) -> None:
        """It need not end by itself; what there is must be the beginning of an object."""
        (output,) = generate(llm, [prompt(9)], constrained(20, json_object=True))
        assert output.outputs[0].text.startswith("{")

    def test_greedy_rows_stay_with_the_sampler_program(self, llm: LLM) -> None:
        with recorded_steps(llm) as steps:
            generate(llm, [prompt(5), prompt(6)], [constrained(regex="[ab]{4}"), greedy(4)])
        used = {name.partition("_")[0] for step in steps for name in step.programs}
        assert "sampler" in used
        assert "draw" not in used

    def test_with_what_vllm_processes(self, llm: LLM) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=20,
            logprobs=3,
            repetition_penalty=1.5,
            structured_outputs=StructuredOutputsParams(regex="[ab]{6}"),
        )
        (output,) = generate(llm, [prompt(5)], params)
        assert re.fullmatch("[ab]{6}", text_of(output))


class TestBesides:
    def test_free_rows_are_untouched(self, llm: LLM) -> None:
        free = [greedy(12), SamplingParams(temperature=0.9, seed=4, max_tokens=12)]
        prompts = [prompt(11), prompt(12)]
        alone = [tokens_of(generate(llm, [p], q)[0]) for p, q in zip(prompts, free, strict=True)]
        bound = constrained(regex="[a-z]{12}")
        outputs = generate(llm, [prompt(13), *prompts, prompt(14)], [bound, *free, bound])
        assert [tokens_of(output) for output in outputs[1:3]] == alone
        assert re.fullmatch("[a-z]{12}", text_of(outputs[0]))

    def test_prompts_of_several_chunks_staggered_with_an_abort(self, llm: LLM) -> None:
        """The scheduler's order of masks is not the batch's, and rows move."""
        patterns = [f"{letter}{{2}}[0-9]{{{size}}}" for size, letter in enumerate("pqrs", start=2)]

        def arrive(number: int) -> None:
            add(llm, str(number), prompt(70 + number), constrained(regex=patterns[number]))

        actions = {2 * number: partial(arrive, number) for number in range(4)}
        actions[9] = partial(llm.llm_engine.abort_request, ["1"])
        outputs = run_to_the_end(llm, actions)
        for number in (0, 2, 3):
            assert re.fullmatch(patterns[number], text_of(outputs[str(number)]))
        check_idle(llm)

    def test_preempted(self, llm: LLM) -> None:
        """The state of a grammar goes on where it was."""
        pattern = "[0-9]{12}[a-f]{25}"
        for number in range(8):
            add(llm, str(number), prompt(20, number), constrained(regex=pattern))
        with counted_preemptions(llm):
            outputs = run_to_the_end(llm)
        assert all(re.fullmatch(pattern, text_of(output)) for output in outputs.values())
        check_idle(llm)

    def test_cut_off(self, llm: LLM) -> None:
        (output,) = generate(llm, [prompt(5)], constrained(3, regex="[0-9]{40}"))
        assert output.outputs[0].finish_reason == "length"
        assert re.fullmatch("[0-9]+", output.outputs[0].text)

    def test_stop_strings(self, llm: LLM) -> None:
        (output,) = generate(llm, [prompt(5)], constrained(regex="[0-9]{4}END[a-z]{9}", stop="END"))
        assert re.fullmatch("[0-9]{4}", text_of(output))
        check_idle(llm)


def test_three_chunks(tiny_llm: LLM) -> None:
    """The grammar is compiled while the prompt waits; chunks before the last draw nothing."""
    (output,) = generate(tiny_llm, [prompt(3 * CHUNK)], constrained(regex="[a-c]{5}"))
    assert re.fullmatch("[a-c]{5}", text_of(output))
