# SPDX-License-Identifier: Apache-2.0
"""Adapters that are compiled in: served and used from the directory alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from rbln_vllm.cli.main import main
from rbln_vllm.lora.fit import AdapterError
from rbln_vllm.optimum import RBLNLlamaForCausalLM, RBLNLoRAAdapterConfig, RBLNLoRAConfig
from tests.adapters import Adapter, change_weights, merged_model
from tests.engine.engines import (
    BLOCK,
    CHUNK,
    MAX_LEN,
    SEQS,
    all_tokens,
    check_idle,
    environment,
    greedy,
    prompt,
    report,
    running_engine,
    tokens_of,
)
from tests.engine.test_compiled_directory import SIZES, UNSAID
from tests.oracle import hf_greedy

NEW = 10
LENGTHS = (1, BLOCK + 1, CHUNK + 1, 2 * CHUNK + 1)
PROMPTS = [prompt(length, seed=7) for length in LENGTHS]
NAMES = ("sql", "chat")
ADAPTERS = {
    "sql": Adapter(rank=8, seed=1),
    "chat": Adapter(rank=3, seed=2, targets=r".*self_attn\.(q|v)_proj", size=2.0),
    "late": Adapter(rank=4, seed=3),
}
OPTIONS: dict[str, Any] = {
    "rbln_batch_size": SEQS,
    "rbln_max_seq_len": MAX_LEN,
    "rbln_prefill_chunk_size": CHUNK,
    "rbln_kvcache_block_size": BLOCK,
    "rbln_decoder_batch_sizes": [1],
}


@dataclass(frozen=True)
class Lab:
    """A compiled directory, of adapters that are gone, and what each must say of the prompts."""

    directory: Path
    root: Path
    expected: dict[str | None, list[list[int]]]

    def late(self) -> LoRARequest:
        """One that is not compiled in."""
        return LoRARequest("late", 9, str(self.root / "late"))


@pytest.fixture(scope="module")
def lab(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    root = tmp_path_factory.mktemp("adapters")
    expected: dict[str | None, list[list[int]]] = {None: said(tiny_llama_dir)}
    for name, adapter in ADAPTERS.items():
        saved = adapter.save(tiny_llama_dir, root / name)
        merged = merged_model(tiny_llama_dir, saved, root / f"{name}-merged", adapter.scale)
        expected[name] = said(merged)
    assert len({str(tokens) for tokens in expected.values()}) == len(expected)
    modules = [f"{name}={root / name}" for name in NAMES]
    target = root / "model"
    arguments = ["compile", str(tiny_llama_dir), "--output", str(target), *SIZES]
    assert main([*arguments, "--lora-modules", *modules, "--parallel", "2"]) == 0
    for name in NAMES:
        shutil.rmtree(root / name)
    return Lab(target, root, expected)


def said(model: Path) -> list[list[int]]:
    return [found.token_ids for found in hf_greedy(model, PROMPTS, NEW, ignore_eos=True)]


@pytest.fixture(scope="module")
def llm(lab: Lab) -> Iterator[LLM]:
    options = {**UNSAID, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 3}
    with running_engine(lab.directory, **options) as engine:
        yield engine
        check_idle(engine)


def ask(
    llm: LLM, which: Sequence[int], requests: Sequence[LoRARequest | None]
) -> list[RequestOutput]:
    inputs: Any = [{"prompt_token_ids": PROMPTS[index]} for index in which]
    found = llm.generate(inputs, greedy(NEW), use_tqdm=False, lora_request=list(requests))
    return list(found)


def of(name: str | None, number: int | None = None) -> LoRARequest | None:
    """A request as of the vendor's API; its path is of files that are gone."""
    if name is None:
        return None
    return LoRARequest(name, number or NAMES.index(name) + 1, f"/adapters/{name}")


def test_all_are_loaded_from_the_start(llm: LLM) -> None:
    assert llm.llm_engine.list_loras() == {1, 2}
    config = llm.llm_engine.vllm_config.lora_config
    assert config is not None
    assert (config.max_loras, config.max_lora_rank) == (2, 8)


@pytest.mark.parametrize("shift", range(3))
def test_equal_a_merged_model(llm: LLM, lab: Lab, shift: int) -> None:
    """Both and the base model in every batch, over the edges of chunk and block."""
    order = [(None, *NAMES)[(index + shift) % 3] for index in range(len(PROMPTS))]
    found = all_tokens(ask(llm, range(len(PROMPTS)), [of(name) for name in order]))
    assert found == [lab.expected[name][index] for index, name in enumerate(order)]
    assert report(llm)["compiled_after_ready"] == 0


def test_a_server_s_own_numbers(llm: LLM, lab: Lab) -> None:
    """It counts what it was given, whatever the numbers in the directory are."""
    for numbers in ({"chat": 1, "sql": 2}, {"sql": 1, "chat": 2}):
        requests = [of(name, number) for name, number in numbers.items()]
        found = all_tokens(ask(llm, [2, 2], requests))
        assert found == [lab.expected[name][2] for name in numbers]


def test_removed_ones_come_back_from_the_directory(llm: LLM, lab: Lab) -> None:
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.list_loras() == {2}
    (output,) = ask(llm, [1], [of("sql")])
    assert tokens_of(output) == lab.expected["sql"][1]
    assert llm.llm_engine.list_loras() == {1, 2}


def test_another_is_loaded_beside_them(llm: LLM, lab: Lab) -> None:
    found = all_tokens(ask(llm, [3, 3, 3], [lab.late(), of("sql"), None]))
    assert found == [lab.expected[name][3] for name in ("late", "sql", None)]
    assert llm.llm_engine.remove_lora(9)
    found = all_tokens(ask(llm, [3, 3], [of("sql"), of("chat")]))
    assert found == [lab.expected[name][3] for name in NAMES]


def test_an_unknown_one_changes_nothing(llm: LLM, lab: Lab) -> None:
    before = llm.llm_engine.list_loras()
    words = r"No adapter found for .*Compiled in are sql \(1\), chat \(2\), by their names"
    for path in ("/adapters/other", str(lab.directory)):
        with pytest.raises(LoRAAdapterNotFoundError, match=words):
            llm.llm_engine.add_lora(LoRARequest("other", 3, path))
    wide = Adapter(rank=9).save(lab.root / "late-merged", lab.root / "wide")
    with pytest.raises(
        AdapterError, match=r"rank 9 is greater than max_lora_rank 8\. Raise --max-lora-rank"
    ):
        llm.llm_engine.add_lora(LoRARequest("wide", 4, str(wide)))
    with pytest.raises(AdapterError, match="'sql' is compiled in and cannot be replaced"):
        llm.llm_engine.add_lora(LoRARequest("sql", 1, str(wide), load_inplace=True))
    assert llm.llm_engine.list_loras() == before
    (output,) = ask(llm, [0], [of("chat")])
    assert tokens_of(output) == lab.expected["chat"][0]


def test_inspect_shows_them(lab: Lab, capsys: Any) -> None:
    assert main(["inspect", str(lab.directory)]) == 0
    text = capsys.readouterr().out
    assert "sql (id 1, rank 8), chat (id 2, rank 3); up to rank 8" in text
    assert "memory adapters" in text
    assert main(["inspect", str(lab.directory), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [a["lora_name"] for a in facts["rbln_config"]["lora_config"]["adapters"]] == [*NAMES]


def test_what_cannot_be_served_is_refused(lab: Lab, capsys: Any) -> None:
    words = "was compiled with the adapters sql, chat: give --enable-lora"
    with pytest.raises(RuntimeError, match=words), running_engine(lab.directory, **UNSAID):
        pass
    with environment(VLLM_ENABLE_V1_MULTIPROCESSING=None):
        assert main(["programs", str(lab.directory)]) == 2
        assert words in capsys.readouterr().err
        assert main(["programs", str(lab.directory), "--enable-lora"]) == 0


@pytest.fixture(scope="module")
def model(lab: Lab) -> Any:
    return RBLNLlamaForCausalLM.from_pretrained(lab.directory)


def continued(model: Any, index: int, rows: int = 1) -> list[list[int]]:
    ids = torch.tensor([PROMPTS[index]] * rows)
    found = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return [row[ids.shape[1] :] for row in found.tolist()]


def test_generates_without_an_engine(model: Any, lab: Lab) -> None:
    for name in (*NAMES, None):
        model.set_adapter(name)
        for index in range(len(PROMPTS)):
            assert continued(model, index) == [lab.expected[name][index]]
    mixed = ["chat", None, "sql"]
    model.set_adapter(mixed)
    assert continued(model, 2, rows=3) == [lab.expected[name][2] for name in mixed]
    model.set_lora_int_ids(torch.tensor([1, 2, 0]))
    assert continued(model, 1, rows=3) == [lab.expected[name][1] for name in (*NAMES, None)]
    with pytest.raises(ValueError, match="chosen for 3 sequences, and these are 1"):
        continued(model, 1)
    model.set_adapter(None)


def test_the_base_model_is_bit_identical(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Beside adapters too, and in bf16, where any other rounding would show."""
    saved = ADAPTERS["sql"].save(tiny_llama_dir, tmp_path)
    lora = RBLNLoRAConfig((RBLNLoRAAdapterConfig(1, "one", str(saved)),))
    options = {**OPTIONS, "dtype": "bfloat16"}
    plain = RBLNLlamaForCausalLM.from_pretrained(tiny_llama_dir, **options)
    adapted = RBLNLlamaForCausalLM.from_pretrained(tiny_llama_dir, rbln_lora_config=lora, **options)
    ids = torch.tensor([PROMPTS[2]] * 3)
    adapted.set_adapter([None, "one", None])
    logits, beside = (each(ids).logits for each in (plain, adapted))
    assert torch.equal(beside[[0, 2]], logits[[0, 2]])
    assert not torch.equal(beside[1], logits[1])


def spoil(directory: Path, how: str) -> None:
    if how == "shape":
        change_weights(directory, lambda t: {k: v[..., :-1].contiguous() for k, v in t.items()})
    elif how == "module":
        change_weights(directory, lambda t: {k.replace("q_proj", "query"): v for k, v in t.items()})
    elif how == "config":
        (directory / "adapter_config.json").unlink()
    elif how == "weights":
        (directory / "adapter_model.safetensors").unlink()


@pytest.fixture
def bad(tiny_llama_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and an adapter of it to be spoiled."""
    return tiny_llama_dir, ADAPTERS["sql"].save(tiny_llama_dir, tmp_path / "sql")


@pytest.mark.parametrize(
    ("how", "more", "words"),
    [
        ("shape", [], "the adapter was made for another model"),
        ("module", [], "query"),
        ("config", [], "adapter_config.json cannot be read"),
        ("weights", [], "adapter_model.safetensors cannot be read"),
        ("rank", ["--max-lora-rank", "7"], "max_lora_rank 7 is below the largest rank 8"),
        ("twice", ["sql=elsewhere"], "lora_name must be unique"),
        ("path", ["chat=./nowhere"], "there is no directory ./nowhere"),
        ("name", ["base=elsewhere"], "the base model's"),
        ("form", ["nothing"], "write NAME=PATH"),
    ],
)
def test_what_cannot_be_compiled_in(
    bad: tuple[Path, Path], capsys: Any, how: str, more: list[str], words: str
) -> None:
    """In words, in a dry run too, and nothing is written."""
    model, saved = bad
    target = saved.with_name("model")
    spoil(saved, how)
    command = ["compile", str(model), *SIZES, "--lora-modules", f"sql={saved}", *more]
    for last in (["--output", str(target)], ["--target", "HOST"]):
        assert main([*command, *last]) == 2
        assert words in capsys.readouterr().err
    assert not target.exists()
