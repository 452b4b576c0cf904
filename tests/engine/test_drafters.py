# SPDX-License-Identifier: Apache-2.0
"""Engines whose drafts come from a model: tokens as without drafts, drafts as by definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rbln_vllm.worker.speculation.drafters import DraftStep
from tests import drafters
from tests.drafters import DrafterOracle
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    add,
    all_tokens,
    check_idle,
    counted_preemptions,
    generate,
    greedy,
    prompt,
    run_to_the_end,
    runner_of,
    running_engine,
    scheduler_of,
    tokens_of,
)

K = 3
PROMPTS = [prompt(n, seed=n) for n in (1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)]
TOKENS = 24
GRAMMAR = "[a-c]{3}-[0-9]{2}"

Dirs = Callable[..., Path]


@dataclass
class Drafted:
    """What was drafted in each step, row by row: the known tokens and the drafts; how many drafts
    were verified, and how many of them stood."""

    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    offered: int = 0
    accepted: int = 0

    def note(self, step: DraftStep, drafts_B: list[list[int]]) -> None:
        for row, new in enumerate(step.sampled_B):
            if not new:
                continue
            computed = int(step.first_positions[row] + step.counts_B[row])
            self.offered += computed - (int(step.lengths_B[row]) - len(new))
            self.accepted += len(new) - 1
            known = step.tokens_BL[row, : step.lengths_B[row]].tolist()
            self.rows.append((known, drafts_B[row]))


@contextmanager
def drafted(llm: LLM) -> Iterator[Drafted]:
    """Every call of the drafter. Fails when there was none."""
    drafter, seen = runner_of(llm).speculation, Drafted()
    assert drafter is not None
    propose = drafter.propose

    def noted(step: DraftStep) -> list[list[int]]:
        drafts_B = propose(step)
        seen.note(step, drafts_B)
        return drafts_B

    drafter.propose = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        drafter.propose = propose  # type: ignore[method-assign]
    assert seen.rows, "nothing was drafted"


def speculating(
    target: Path, drafter: Path | None, method: str, count: int = K, **arguments: Any
) -> Any:
    """An engine with a drafter; ``draft_`` keys go to the speculative configuration."""
    extra = {n.removeprefix("draft_"): arguments.pop(n) for n in list(arguments) if "draft_" in n}
    config = {"method": method, "num_speculative_tokens": count, **extra}
    if drafter is not None:
        config["model"] = str(drafter)
    return running_engine(target, speculative_config=config, **arguments)


def check_drafts(seen: Drafted, oracle: DrafterOracle, count: int = K) -> None:
    """Each different row of known tokens once: an oracle without a cache is slow."""
    different = {tuple(known): drafts for known, drafts in seen.rows}
    for known, drafts in sorted(different.items())[:: max(1, len(different) // 40)]:
        fits = len(known) + count <= MAX_LEN
        assert drafts == (oracle.drafts(known, count) if fits else []), f"{len(known)} tokens"


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Dirs) -> dict[str, list[list[int]]]:
    """Greedy tokens without drafts, by model."""
    found = {}
    for name, target in targets(tiny_model_dir).items():
        with running_engine(target) as llm:
            found[name] = all_tokens(generate(llm, PROMPTS, greedy(TOKENS)))
            found[f"{name} bound"] = all_tokens(generate(llm, PROMPTS, bound()))
    return found


def bound() -> list[SamplingParams]:
    """Every other request obeys a grammar; some draw."""
    return [
        SamplingParams(
            temperature=0.8 * (number % 3 == 0),
            seed=number,
            max_tokens=TOKENS,
            structured_outputs=StructuredOutputsParams(regex=GRAMMAR) if number % 2 else None,
        )
        for number in range(len(PROMPTS))
    ]


def check_bound(llm: LLM, expected: list[list[int]]) -> None:
    """Tokens of `bound` requests as without drafts, and text that matches the grammar."""
    with drafted(llm) as seen:
        outputs = generate(llm, PROMPTS, bound())
    assert all_tokens(outputs) == expected
    # Behind a prompt that ends within a character vLLM repeats the prompt.
    assert all(re.search(f"{GRAMMAR}$", output.outputs[0].text) for output in outputs[1::2])
    assert seen.offered > 0
    check_idle(llm)


def targets(tiny_model_dir: Dirs) -> dict[str, Path]:
    return {
        "llama": tiny_model_dir("LlamaForCausalLM"),
        "llama3": tiny_model_dir("LlamaForCausalLM", num_hidden_layers=3),
        "qwen2": tiny_model_dir("Qwen2ForCausalLM"),
    }


class TestSameModel:
    """A draft model that is the target: every draft is accepted."""

    @pytest.fixture(scope="class")
    def llm(self, tiny_llama_dir: Path) -> Iterator[LLM]:
        with speculating(tiny_llama_dir, tiny_llama_dir, "draft_model") as llm:
            yield llm

    def test_tokens_are_the_same_and_every_draft_is_accepted(
        self, llm: LLM, plain: dict[str, list[list[int]]]
    ) -> None:
        with drafted(llm) as seen:
            assert all_tokens(generate(llm, PROMPTS, greedy(TOKENS))) == plain["llama"]
        assert seen.accepted == seen.offered > 0
        check_idle(llm)

    def test_beside_grammars(self, llm: LLM, plain: dict[str, list[list[int]]]) -> None:
        check_bound(llm, plain["llama bound"])

    def test_prompts_that_are_cached_are_drafted_as_well(
        self, llm: LLM, plain: dict[str, list[list[int]]]
    ) -> None:
        """The rest of the prompt is one token, or ends inside a block."""
        with drafted(llm) as seen:
            again = [*PROMPTS, PROMPTS[-1][: BLOCK + 1], PROMPTS[-1] + plain["llama"][-1][:3]]
            first = all_tokens(generate(llm, again, greedy(TOKENS)))
        assert first[: len(PROMPTS)] == plain["llama"]
        assert first[-1] == plain["llama"][-1][3:] + first[-1][-3:]
        assert seen.accepted == seen.offered > 0

    def test_the_end_of_the_context(self, llm: LLM) -> None:
        lengths = [MAX_LEN - 1, MAX_LEN - K, MAX_LEN - K - 1, MAX_LEN - 2 * K]
        with drafted(llm) as seen:
            outputs = generate(llm, [prompt(n, seed=9) for n in lengths], greedy(50))
        assert [len(tokens_of(o)) for o in outputs] == [MAX_LEN - n for n in lengths]
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        assert all(not d for known, d in seen.rows if len(known) + K > MAX_LEN)
        check_idle(llm)

    @pytest.mark.parametrize("step", range(1, 9, 2))
    def test_an_abort_at_any_step_leaves_the_pool_as_it_was(
        self, llm: LLM, step: int, plain: dict[str, list[list[int]]]
    ) -> None:
        add(llm, f"gone{step}", PROMPTS[-1], greedy(TOKENS))
        add(llm, f"stays{step}", PROMPTS[1], greedy(TOKENS))
        ends = {step: lambda: llm.llm_engine.abort_request([f"gone{step}"])}
        outputs = run_to_the_end(llm, ends)
        assert tokens_of(outputs[f"stays{step}"]) == plain["llama"][1]
        check_idle(llm)

    def test_temperature_and_stop_and_seed(self, llm: LLM) -> None:
        """Any sampling ends well, and a seed gives the same tokens again."""
        params = SamplingParams(temperature=0.8, seed=4, max_tokens=TOKENS, ignore_eos=True)
        first, second = (all_tokens(generate(llm, PROMPTS[:3], params)) for _ in range(2))
        assert first == second


def test_preemption_with_a_draft_model(
    tiny_llama_dir: Path, plain: dict[str, list[list[int]]]
) -> None:
    blocks = 2 * (MAX_LEN // BLOCK) - 4
    prompts = [prompt(CHUNK + 20, seed=s) for s in range(4)]
    arguments: dict[str, Any] = {"num_gpu_blocks_override": blocks}
    with running_engine(tiny_llama_dir) as llm:
        expected = all_tokens(generate(llm, prompts, greedy(60)))
    with speculating(tiny_llama_dir, tiny_llama_dir, "draft_model", **arguments) as llm:
        with counted_preemptions(llm), drafted(llm) as seen:
            assert all_tokens(generate(llm, prompts, greedy(60))) == expected
        assert seen.accepted == seen.offered > 0
        check_idle(llm)


@pytest.mark.parametrize("implementation", ["vllm", "transformers"])
def test_another_draft_model(
    tiny_model_dir: Dirs, implementation: str, plain: dict[str, list[list[int]]]
) -> None:
    """Another architecture, with other heads; its own context is shorter."""
    drafter = tiny_model_dir("Qwen3ForCausalLM", num_hidden_layers=1, num_key_value_heads=4)
    target, limit = tiny_model_dir("LlamaForCausalLM"), CHUNK + 20
    with speculating(
        target, drafter, "draft_model", draft_max_model_len=limit, model_impl=implementation
    ) as llm:
        with drafted(llm) as seen:
            assert all_tokens(generate(llm, PROMPTS, greedy(TOKENS))) == plain["llama"]
        own = greedy_continuations(drafter, [known for known, drafts in seen.rows if drafts][:30])
        assert [drafts for _, drafts in seen.rows if drafts][:30] == own
        assert all(bool(d) == (len(known) + K <= limit) for known, d in seen.rows)


def greedy_continuations(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    from tests.oracle import hf_greedy

    return [found.token_ids for found in hf_greedy(model, prompts, K, ignore_eos=True)]


@pytest.mark.parametrize("sub_blocks", [True, False])
def test_eagle(
    tiny_model_dir: Dirs, tmp_path: Path, plain: dict[str, list[list[int]]], sub_blocks: bool
) -> None:
    """Of a cached prefix the last sub-block, or block, is computed again."""
    target = targets(tiny_model_dir)["llama"]
    drafter = drafters.make_eagle(target, tmp_path / "drafter")
    oracle = drafters.EagleOracle(target, drafter)
    options = {"additional_config": {"enable_sub_block_cache": sub_blocks}}
    check_engine(target, drafter, "eagle", oracle, plain, model="llama", **options)


def test_eagle3(tiny_model_dir: Dirs, tmp_path: Path, plain: dict[str, list[list[int]]]) -> None:
    target = targets(tiny_model_dir)["llama3"]
    drafter = drafters.make_eagle3(target, tmp_path / "drafter")
    oracle = drafters.Eagle3Oracle(target, drafter)
    check_engine(target, drafter, "eagle3", oracle, plain, model="llama3")


def test_medusa(tiny_model_dir: Dirs, tmp_path: Path, plain: dict[str, list[list[int]]]) -> None:
    target = targets(tiny_model_dir)["llama"]
    drafter = drafters.make_medusa(target, tmp_path / "drafter", K)
    oracle = drafters.MedusaOracle(target, drafter)
    check_engine(target, drafter, "medusa", oracle, plain, model="llama")


def test_mtp(tiny_model_dir: Dirs, tmp_path: Path, plain: dict[str, list[list[int]]]) -> None:
    qwen2 = targets(tiny_model_dir)["qwen2"]
    target = drafters.make_mimo(qwen2, tmp_path / "mimo")
    check_engine(target, None, "mtp", drafters.MimoOracle(qwen2, target), plain, model="qwen2")


def check_engine(
    target: Path,
    drafter: Path | None,
    method: str,
    oracle: DrafterOracle,
    plain: dict[str, list[list[int]]],
    *,
    model: str,
    **options: Any,
) -> None:
    """Tokens as without drafts, drafts as the oracle's: cold, and after a prefix that is cached."""
    expected = plain[model]
    with speculating(target, drafter, method, **options) as llm:
        with drafted(llm) as seen:
            assert all_tokens(generate(llm, PROMPTS, greedy(TOKENS))) == expected
        check_drafts(seen, oracle)
        continued = [*PROMPTS, PROMPTS[-1] + expected[-1][: TOKENS // 2]]
        with drafted(llm) as warm:
            again = generate(llm, continued, greedy(TOKENS))
        assert all_tokens(again)[: len(PROMPTS)] == expected
        assert any(output.num_cached_tokens for output in again)
        check_drafts(warm, oracle)
        check_bound(llm, plain[f"{model} bound"])
        check_idle(llm)
        assert scheduler_of(llm).num_lookahead_tokens == (0 if method == "medusa" else K)


def test_a_warm_start_builds_neither_model(tiny_llama_dir: Path, monkeypatch: Any) -> None:
    from rbln_vllm.models.vllm_builder import VllmModelBuilder

    with speculating(tiny_llama_dir, tiny_llama_dir, "draft_model") as llm:
        expected = all_tokens(generate(llm, PROMPTS[:2], greedy(8)))

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr(VllmModelBuilder, "__init__", refuse)
    with speculating(tiny_llama_dir, tiny_llama_dir, "draft_model") as llm:
        assert all_tokens(generate(llm, PROMPTS[:2], greedy(8))) == expected


def test_target_without_inner_states_is_refused(tiny_model_dir: Dirs, tmp_path: Path) -> None:
    """vLLM has not prepared this architecture for EAGLE-3."""
    target = tiny_model_dir("GPT2LMHeadModel")
    llama = tiny_model_dir("LlamaForCausalLM", num_hidden_layers=3)
    drafter = drafters.make_eagle3(llama, tmp_path / "drafter")
    with (
        pytest.raises(RuntimeError, match="does not support EAGLE3"),
        speculating(target, drafter, "eagle3"),
    ):
        pass
