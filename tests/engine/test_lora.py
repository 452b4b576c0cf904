# SPDX-License-Identifier: Apache-2.0
"""Adapters in engines: equal to a merged model, and the base model untouched.

The oracle of an adapter is Hugging Face's eager model with `W + scale * B @ A` for its weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from rbln_vllm.lora.fit import AdapterError
from tests.adapters import Adapter, change_weights, merged_model
from tests.engine.bf16_rule import check_bf16
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    add,
    all_tokens,
    check_idle,
    generate,
    greedy,
    prompt,
    recorded_steps,
    report,
    run_to_the_end,
    runner_of,
    running_engine,
    scheduler_of,
    tokens_of,
)
from tests.oracle import hf_greedy

MAX_RANK, NEW = 8, 12
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": MAX_RANK,
}
ATTENTION = r".*self_attn\.(q|v)_proj"
LENGTHS = (1, BLOCK + 1, CHUNK + 1, 2 * CHUNK + 1)


@dataclass(frozen=True, eq=False)
class Saved:
    """An adapter on disk, and its request."""

    adapter: Adapter
    model: Path
    directory: Path
    number: int

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(f"adapter-{self.number}", self.number, str(self.directory))

    def expected(self, prompts: Sequence[Sequence[int]], tokens: int = NEW) -> list[list[int]]:
        merged = self.directory.with_name(f"{self.directory.name}-merged")
        merged_model(self.model, self.directory, merged, self.adapter.scale)
        found = hf_greedy(merged, prompts, tokens, ignore_eos=True)
        return [item.token_ids for item in found]


Save = Callable[..., Saved]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves an adapter for a model under a number of its own."""
    root = tmp_path_factory.mktemp("adapters")
    numbers = iter(range(1, 1000))

    def save_one(model: Path, **fields: Any) -> Saved:
        number = next(numbers)
        adapter = Adapter(**{"seed": number, **fields})
        directory = adapter.save(model, root / f"adapter-{number}")
        return Saved(adapter, model, directory, number)

    return save_one


def ask(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[Saved | None],
    params: SamplingParams | None = None,
) -> list[RequestOutput]:
    inputs: Any = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
    requests: Any = [None if saved is None else saved.request for saved in adapters]
    outputs: list[RequestOutput] = llm.generate(
        inputs, params or greedy(NEW), use_tqdm=False, lora_request=requests
    )
    return outputs


def base_tokens(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [item.token_ids for item in hf_greedy(model, prompts, NEW, ignore_eos=True)]


@dataclass(frozen=True)
class Case:
    """A model of one implementation, and which of its linears adapters change."""

    implementation: str
    name: str
    targets: str = r".*(q|k|v|o|gate|up|down)_proj"
    overrides: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.implementation} {self.name}"


CASES = (
    Case("vllm", "OPTForCausalLM", r".*((q|k|v|out)_proj|fc1|fc2)"),
    Case("vllm", "Qwen2ForCausalLM"),
    Case("transformers", "LlamaForCausalLM"),
    Case("transformers", "Gemma2ForCausalLM"),
    Case("transformers", "PhiForCausalLM", r".*((q|k|v)_proj|dense|fc1|fc2)"),
    Case("transformers", "GPT2LMHeadModel", r".*(c_attn|c_proj|c_fc)"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_merged_model(tiny_model_dir: Callable[..., Path], save: Save, case: Case) -> None:
    """Two adapters and the base model in every batch, over chunk and block edges."""
    model = tiny_model_dir(case.name, **case.overrides)
    one = save(model, targets=case.targets, rank=MAX_RANK)
    two = save(model, targets=case.targets, rank=3)
    prompts = [prompt(length, seed=7) for length in LENGTHS]
    expected = {None: base_tokens(model, prompts), one: one.expected(prompts)}
    expected[two] = two.expected(prompts)
    assert expected[None] != expected[one] != expected[two]
    with running_engine(model, model_impl=case.implementation, **LORA) as llm:
        for shift in range(3):
            order = [(None, one, two)[(i + shift) % 3] for i in range(len(prompts))]
            found = all_tokens(ask(llm, prompts, order))
            assert found == [expected[saved][i] for i, saved in enumerate(order)]
        assert report(llm)["compiled_after_ready"] == 0


@pytest.fixture(scope="module")
def llama(tiny_llama_dir: Path) -> Iterator[LLM]:
    """vLLM's Llama with two slots and three adapters in memory."""
    with running_engine(tiny_llama_dir, **LORA) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llama" in request.fixturenames:
        llm = request.getfixturevalue("llama")
        check_idle(llm)
        for number in llm.llm_engine.list_loras():
            assert llm.llm_engine.remove_lora(number)


def test_the_base_model_is_bit_identical(tiny_llama_dir: Path, save: Save) -> None:
    """In bf16, where any other rounding would show: scores beside adapters and without LoRA."""
    saved = save(tiny_llama_dir)
    prompts = [prompt(length, seed=3) for length in (*LENGTHS, 200)]
    params = greedy(NEW, logprobs=5, prompt_logprobs=5)
    with running_engine(tiny_llama_dir, dtype="bfloat16") as llm:
        without = generate(llm, prompts, params)
    with running_engine(tiny_llama_dir, dtype="bfloat16", **LORA) as llm:
        alone = generate(llm, prompts, params)
        beside = ask(llm, prompts * 2, [saved, None] * len(prompts), params)
    for expected, one in zip(without, alone, strict=True):
        assert scores(one) == scores(expected)
    assert beside[1].prompt_token_ids == prompts[1]
    for index in range(1, len(beside), 2):  # those without an adapter
        assert scores(beside[index]) == scores(without[index % len(prompts)])


def scores(output: RequestOutput) -> Any:
    """Tokens and their exact log-probabilities, of the prompt too."""
    places = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    exact = [{token: score.logprob for token, score in (p or {}).items()} for p in places]
    return tokens_of(output), exact


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"rank": MAX_RANK - 1},
        {"rank": MAX_RANK},
        {"rank": 4, "config": {"use_rslora": True}},
        {"rank": 4, "targets": ATTENTION},
        {"rank": 2, "alpha": 3.0},
    ],
    ids=str,
)
def test_ranks_and_scales(
    llama: LLM, tiny_llama_dir: Path, save: Save, fields: dict[str, Any]
) -> None:
    saved, prompts = save(tiny_llama_dir, **fields), [prompt(BLOCK, seed=8)]
    assert all_tokens(ask(llama, prompts, [saved])) == saved.expected(prompts)


def test_ranks_of_single_modules(llama: LLM, tiny_llama_dir: Path, save: Save) -> None:
    """PEFT's patterns: one module has another rank and scale."""
    saved = save(tiny_llama_dir, rank=4, alpha=4.0)
    two = {"rank_pattern": {"layers.0.mlp.up_proj": 2}}
    saved.adapter.write_config(saved.directory)
    settings = json.loads((saved.directory / "adapter_config.json").read_text())
    (saved.directory / "adapter_config.json").write_text(json.dumps({**settings, **two}))
    name = "base_model.model.model.layers.0.mlp.up_proj"

    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{name}.lora_A.weight"] = tensors[f"{name}.lora_A.weight"][:2].contiguous()
        b = tensors[f"{name}.lora_B.weight"][:, :2].contiguous()
        tensors[f"{name}.lora_B.weight"] = b
        return tensors

    change_weights(saved.directory, halve)
    prompts = [prompt(BLOCK, seed=8)]
    found = all_tokens(ask(llama, prompts, [saved]))
    # Its scale there is 4 / 2; the merged oracle has one scale, so B is doubled for it.
    change_weights(
        saved.directory,
        lambda tensors: {
            k: 2 * t if k == f"{name}.lora_B.weight" else t for k, t in tensors.items()
        },
    )
    assert found == saved.expected(prompts)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (lambda d: Adapter(rank=MAX_RANK + 1), "--max-lora-rank"),
    "shape": (
        lambda d: change_weights(d, lambda t: {k: v[..., :-1].contiguous() for k, v in t.items()}),
        "another model",
    ),
    "half": (
        lambda d: change_weights(d, lambda t: {k: v for k, v in t.items() if "lora_A" in k}),
        "lora_B is missing",
    ),
    "prefix": (
        lambda d: change_weights(
            d, lambda t: {k.replace("model.layers", "decoder.layers"): v for k, v in t.items()}
        ),
        "under their names",
    ),
    "module": (
        lambda d: change_weights(
            d, lambda t: {k.replace("q_proj", "query"): v for k, v in t.items()}
        ),
        "query",
    ),
    "nothing": (lambda d: change_weights(d, lambda t: {}), "no LoRA weights"),
    "dora": (lambda d: Adapter(config={"use_dora": True}).write_config(d), "DoRA"),
    "bias": (lambda d: Adapter(config={"bias": "all"}).write_config(d), "bias"),
    "head": (
        lambda d: Adapter(config={"modules_to_save": ["lm_head"]}).write_config(d),
        "modules_to_save",
    ),
    "config": (lambda d: (d / "adapter_config.json").write_text("{"), "no JSON"),
    "no settings": (lambda d: (d / "adapter_config.json").write_text("[]"), "holds no settings"),
    "scale": (lambda d: Adapter(config={"lora_alpha": "8"}).write_config(d), "no number"),
    "another rank": (lambda d: Adapter(config={"r": 2}).write_config(d), "settings say 2"),
    "infinite": (lambda d: change_weights(d, lambda t: {k: v / 0 for k, v in t.items()}), "NaN"),
    "empty config": (lambda d: (d / "adapter_config.json").write_text("{}"), "Missing required"),
    "weights": (
        lambda d: (d / "adapter_model.safetensors").write_bytes(b"not a safetensors file"),
        "adapter",
    ),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "contain tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters(llama: LLM, tiny_llama_dir: Path, save: Save, kind: str) -> None:
    """Refused in words; the others go on as if it had never been."""
    spoil, message = BAD[kind]
    good = save(tiny_llama_dir, seed=1)
    prompts = [prompt(9, seed=1)]
    before = all_tokens(ask(llama, prompts, [good]))
    bad = save(tiny_llama_dir, rank=MAX_RANK + 1) if kind == "rank" else save(tiny_llama_dir)
    spoil(bad.directory)
    with pytest.raises(AdapterError, match=message):
        llama.llm_engine.add_lora(bad.request)
    assert llama.llm_engine.list_loras() == {good.number}
    assert all_tokens(ask(llama, prompts, [good])) == before


def test_missing_files(llama: LLM) -> None:
    for directory in ("/nowhere", __file__):
        with pytest.raises(LoRAAdapterNotFoundError):
            llama.llm_engine.add_lora(LoRARequest("gone", 999, directory))


def test_a_request_with_a_bad_adapter_ends_alone(
    llama: LLM, tiny_llama_dir: Path, save: Save
) -> None:
    good, bad = save(tiny_llama_dir), save(tiny_llama_dir)
    shutil.rmtree(bad.directory)
    prompts = [prompt(length, seed=2) for length in (9, 12, CHUNK + 1)]
    found = ask(llama, prompts, [good, bad, None])
    assert found[1].outputs[0].finish_reason == "error"
    assert tokens_of(found[1]) == []
    assert tokens_of(found[0]) == good.expected(prompts)[0]
    assert tokens_of(found[2]) == base_tokens(tiny_llama_dir, prompts)[2]


def test_more_adapters_than_slots(llama: LLM, tiny_llama_dir: Path, save: Save) -> None:
    """Of a burst for four adapters and none at most two are in a batch; nobody starves."""
    adapters = [*(save(tiny_llama_dir, rank=1 + i) for i in range(4)), None]
    prompts = [prompt(10 + i, seed=5) for i in range(10)]
    order = [adapters[i % 5] for i in range(10)]
    with recorded_steps(llama) as steps:
        found = all_tokens(ask(llama, prompts, order))
    for index, saved in enumerate(order):
        model = base_tokens(tiny_llama_dir, prompts) if saved is None else saved.expected(prompts)
        assert found[index] == model[index]
    assert len(steps) > 20
    assert len(llama.llm_engine.list_loras()) == LORA["max_cpu_loras"]
    manager = runner_of(llama).lora_manager._adapter_manager
    assert len(manager._active_adapters) == LORA["max_loras"]


def test_prefixes_are_separate(llama: LLM, tiny_llama_dir: Path, save: Save) -> None:
    """The same prompt with an adapter, another and none: no hit but on its own blocks."""
    one, two = save(tiny_llama_dir), save(tiny_llama_dir)
    prompts = [prompt(3 * BLOCK + 1, seed=11)]
    expected = {
        one: one.expected(prompts),
        two: two.expected(prompts),
        None: base_tokens(tiny_llama_dir, prompts),
    }
    for saved in (one, two, None):
        (output,) = ask(llama, prompts, [saved])
        assert output.num_cached_tokens == 0
        assert [tokens_of(output)] == expected[saved]
    for saved in (one, two, None):
        (output,) = ask(llama, prompts, [saved])
        assert output.num_cached_tokens == 3 * BLOCK
        assert [tokens_of(output)] == expected[saved]


def test_added_pinned_and_removed(llama: LLM, tiny_llama_dir: Path, save: Save) -> None:
    engine = llama.llm_engine
    saved = [save(tiny_llama_dir) for _ in range(4)]
    for item in saved:
        engine.add_lora(item.request)
    assert engine.list_loras() == {item.number for item in saved[1:]}
    assert engine.pin_lora(saved[1].number)
    engine.add_lora(saved[0].request)
    assert saved[1].number in engine.list_loras()
    assert engine.remove_lora(saved[1].number)
    assert not engine.remove_lora(saved[1].number)
    assert saved[1].number not in engine.list_loras()
    with pytest.raises(ValueError, match="not registered"):
        engine.pin_lora(12345)


def test_an_adapter_that_was_removed_is_loaded_again(
    llama: LLM, tiny_llama_dir: Path, save: Save
) -> None:
    """Also in the middle of a request."""
    saved, tokens = save(tiny_llama_dir), prompt(9, seed=6)
    add(llama, "one", tokens, greedy(NEW), lora_request=saved.request)
    actions = {4: lambda: llama.llm_engine.remove_lora(saved.number)}
    found = run_to_the_end(llama, actions)
    assert [tokens_of(found["one"])] == saved.expected([tokens])


def test_scheduling_holds_back_what_finds_no_slot(
    llama: LLM, tiny_llama_dir: Path, save: Save
) -> None:
    adapters = [save(tiny_llama_dir) for _ in range(3)]
    most = 0

    def look() -> None:
        nonlocal most
        running = scheduler_of(llama).running
        most = max(most, len({r.lora_request.lora_int_id for r in running if r.lora_request}))

    for number, saved in enumerate(adapters):
        add(llama, str(number), prompt(9), greedy(NEW), lora_request=saved.request)
    found = run_to_the_end(llama, dict.fromkeys(range(60), look))
    assert most == 2
    for number, saved in enumerate(adapters):
        assert [tokens_of(found[str(number)])] == saved.expected([prompt(9)])


def test_only_targets_are_adapted(tiny_llama_dir: Path, save: Save) -> None:
    """`--lora-target-modules`, by the name of a module or of the layer that computes it."""
    prompts = [prompt(BLOCK + 1, seed=9)]
    one = save(tiny_llama_dir, targets=r".*(v|o|gate|up)_proj")
    other = save(tiny_llama_dir, targets=r".*down_proj")
    targets = ["v_proj", "o_proj", "gate_up_proj"]
    with running_engine(tiny_llama_dir, lora_target_modules=targets, **LORA) as llm:
        assert all_tokens(ask(llm, prompts, [one])) == one.expected(prompts)
        with pytest.raises(AdapterError, match=r"down_proj.*--lora-target-modules"):
            llm.llm_engine.add_lora(other.request)


def test_targets_that_no_linear_has(tiny_llama_dir: Path) -> None:
    with (
        pytest.raises(ValueError, match="names no linear of this model"),
        running_engine(tiny_llama_dir, lora_target_modules=["query"], **LORA),
    ):
        pass


def test_smollm2(smollm2_dir: Path, save: Save) -> None:
    """A real model in bf16, with an adapter of every linear."""
    saved = save(smollm2_dir, rank=16, size=0.2)
    prompts = [prompt(length, seed=1) for length in (9, CHUNK + 1)]
    merged = saved.directory.with_name(f"{saved.directory.name}-merged")
    merged_model(smollm2_dir, saved.directory, merged, saved.adapter.scale)
    with running_engine(smollm2_dir, dtype="bfloat16", **{**LORA, "max_lora_rank": 16}) as llm:
        outputs = ask(llm, prompts, [saved] * 2, greedy(24, logprobs=1))
        base = ask(llm, prompts, [None, None], greedy(24, logprobs=1))
    check_bf16(merged, outputs, hf_greedy(merged, prompts, 24, ignore_eos=True))
    check_bf16(smollm2_dir, base, hf_greedy(smollm2_dir, prompts, 24, ignore_eos=True))
