# SPDX-License-Identifier: Apache-2.0
"""Adapters through the server: at start, at run time, and those that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rbln_vllm.cli.main import main
from tests.adapters import Adapter, merged_model
from tests.oracle import hf_greedy
from tests.server.live import (
    CHUNK,
    MODEL,
    LiveServer,
    prompt,
    running_server,
    serve_arguments,
    token_ids,
)

NEW = 8
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class Lab:
    """A server with the adapter `first` from its start, and a place for others."""

    server: LiveServer
    model: Path
    root: Path

    def save(self, name: str, **fields: Any) -> Path:
        return Adapter(**{"seed": len(name), **fields}).save(self.model, self.root / name)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(f"{self.server.url}{path}", json=body)

    def load(self, name: str, directory: Path, **more: Any) -> httpx.Response:
        return self.post(LOAD, lora_name=name, lora_path=str(directory), **more)

    def unload(self, name: str) -> httpx.Response:
        return self.post(UNLOAD, lora_name=name)

    def names(self) -> set[str]:
        return {model.id for model in self.server.client.models.list()}

    def tokens(self, name: str, tokens: list[int]) -> list[int]:
        answer = self.server.complete(tokens, model=name, max_tokens=NEW, ignore_eos=True)
        return token_ids(answer.choices[0])

    def expected(self, directory: Path | None, tokens: list[int]) -> list[int]:
        model = self.model
        if directory is not None:
            scale = Adapter().scale
            target = directory.with_name(f"{directory.name}-merged")
            model = merged_model(self.model, directory, target, scale)
        (found,) = hf_greedy(model, [tokens], NEW, ignore_eos=True)
        return found.token_ids


@pytest.fixture(scope="module")
def lab(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("lora")
    first = Adapter(seed=5).save(tiny_llama_dir, root / "first")
    arguments = serve_arguments(tiny_llama_dir, max_loras=2, max_cpu_loras=4, max_lora_rank=8)
    arguments += ["--enable-lora", "--lora-modules", f"first={first}"]
    with running_server(arguments, root / "log", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        yield Lab(server, tiny_llama_dir, root)


def test_from_the_start(lab: Lab) -> None:
    tokens = prompt(CHUNK + 1)
    assert {MODEL, "first"} <= lab.names()
    assert lab.tokens("first", tokens) == lab.expected(lab.root / "first", tokens)
    assert lab.tokens(MODEL, tokens) == lab.expected(None, tokens)


def test_loaded_used_beside_others_and_unloaded(lab: Lab) -> None:
    second = lab.save("second")
    assert lab.load("second", second).status_code == 200
    assert "second" in lab.names()
    tokens = prompt(20)
    asked = ["second", "first", MODEL, "second", "first", MODEL]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda name: lab.tokens(name, tokens), asked))
    paths = {"second": second, "first": lab.root / "first", MODEL: None}
    assert found == [lab.expected(paths[name], tokens) for name in asked]
    assert lab.load("second", second).status_code == 400  # it is loaded
    assert lab.unload("second").status_code == 200
    assert "second" not in lab.names()
    with pytest.raises(Exception, match="does not exist"):
        lab.tokens("second", tokens)
    assert lab.unload("second").status_code == 404


def test_bad_ones_harm_nobody(lab: Lab) -> None:
    tokens, names = prompt(9), lab.names()
    broken = lab.save("broken", rank=16)
    answer = lab.load("broken", broken)
    assert answer.status_code >= 400
    assert "--max-lora-rank" in answer.text
    (broken / "adapter_config.json").write_text(json.dumps({"r": 4}))
    assert "lora_alpha" in lab.load("broken", broken).text
    missing = lab.load("missing", lab.root / "missing")
    assert missing.status_code == 404
    assert lab.names() == names
    assert lab.tokens("first", tokens) == lab.expected(lab.root / "first", tokens)
    assert lab.tokens(MODEL, tokens) == lab.expected(None, tokens)


def test_other_weights_under_a_name(lab: Lab) -> None:
    """Loaded in place from another directory: no block of the old weights is used again."""
    old, new = lab.save("old", seed=30), lab.save("new", seed=31)
    tokens = prompt(3 * CHUNK + 1)
    assert lab.load("mine", old).status_code == 200
    assert lab.tokens("mine", tokens) == lab.expected(old, tokens)
    assert lab.load("mine", new, load_inplace=True).status_code == 200
    shutil.rmtree(old)
    for _ in range(2):
        assert lab.tokens("mine", tokens) == lab.expected(new, tokens)
    assert lab.unload("mine").status_code == 200


def test_metrics_name_the_adapters(lab: Lab) -> None:
    lab.tokens("first", prompt(5))
    samples = lab.server.metrics().samples
    infos = [labels for name, labels, _ in samples if name == "vllm:lora_requests_info"]
    assert infos
    assert all(labels["max_lora"] == "2" for labels in infos)
    assert lab.server.metrics()["rbln_programs_compiled_after_ready_total"] == 0


def test_compiled_in(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """From the directory alone: adapters by their names, in another order than they are stored."""
    adapters = {"sql": Adapter(seed=40), "chat": Adapter(seed=41)}
    expected, tokens = {}, prompt(CHUNK + 1)
    for name, adapter in adapters.items():
        saved = adapter.save(tiny_llama_dir, tmp_path / name)
        merged = merged_model(tiny_llama_dir, saved, tmp_path / f"{name}-merged", adapter.scale)
        (found,) = hf_greedy(merged, [tokens], NEW, ignore_eos=True)
        expected[name] = found.token_ids
    modules, target = [f"{name}={tmp_path / name}" for name in adapters], tmp_path / "model"
    sizes = ["--batch-size", "2", "--max-seq-len", "128", "--prefill-chunk-size", str(CHUNK)]
    command = ["compile", str(tiny_llama_dir), "-o", str(target), *sizes]
    assert main([*command, "--lora-modules", *modules]) == 0
    for name in adapters:
        shutil.rmtree(tmp_path / name)
    serve = [str(target), "--served-model-name", MODEL, "--enable-lora", "--lora-modules"]
    serve += [f"{name}={target}" for name in reversed(adapters)]
    with running_server(serve, tmp_path / "log") as server:
        assert {MODEL, *adapters} <= {model.id for model in server.client.models.list()}
        for name, ids in expected.items():
            answer = server.complete(tokens, model=name, max_tokens=NEW, ignore_eos=True)
            assert token_ids(answer.choices[0]) == ids
