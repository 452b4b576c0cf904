# SPDX-License-Identifier: Apache-2.0
"""Grammars are compiled by the backend of their request, whoever came first."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.structured_output as vllms
from vllm.v1.structured_output import StructuredOutputManager

from rbln_vllm.core.grammar_backends import use_backends_of_requests

LENGTHS = {"xgrammar": 3, "guidance": 3, "longer": 4}


class Backend:
    def __init__(self, name: str) -> None:
        self.name = name

    def compile_grammar(self, kind: str, text: str, stop_token_ids: object = None) -> str:
        return f"{self.name}: {kind} {text}"

    def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, LENGTHS[self.name], dtype=torch.int32)


class AtOnce:
    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[str] = []
    names = {"XgrammarBackend": "xgrammar", "GuidanceBackend": "guidance"}
    for place, name in names.items():
        monkeypatch.setattr(vllms, place, make(made, name))
    manager: Any = object.__new__(StructuredOutputManager)
    manager.backend, manager.tokenizer, manager.executor = None, None, AtOnce()
    manager._use_async_grammar_compilation = True
    manager.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 9))
    manager.made = made
    use_backends_of_requests(manager)
    return manager


def make(made: list[str], name: str) -> Any:
    def made_by(*_: Any, **__: Any) -> Backend:
        made.append(name)
        return Backend(name)

    return made_by


def compiled(manager: Any, backend: str) -> Any:
    params = SimpleNamespace(
        structured_outputs=SimpleNamespace(_backend=backend), all_stop_token_ids=set()
    )
    structured = SimpleNamespace(structured_output_key=("regex", "a"), grammar=None)
    request = SimpleNamespace(
        request_id="1", sampling_params=params, structured_output_request=structured
    )
    manager.grammar_init(request)
    return structured.grammar


@pytest.mark.parametrize("order", [["xgrammar", "guidance"], ["guidance", "xgrammar"]])
def test_each_request_has_its_backend(manager: Any, order: list[str]) -> None:
    for name in [*order, *order]:
        assert compiled(manager, name).result() == f"{name}: regex a"
    assert manager.made == order
    assert manager.backend.name == order[0]


def test_masks_of_another_length_fail_their_request_alone(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllms, "GuidanceBackend", make([], "longer"))
    assert compiled(manager, "xgrammar").result() == "xgrammar: regex a"
    with pytest.raises(ValueError, match="differ in length: choose one by --structured-outputs"):
        compiled(manager, "guidance").result()
    assert compiled(manager, "xgrammar").result() == "xgrammar: regex a"


def test_without_a_grammar_nothing_is_made(manager: Any) -> None:
    request = SimpleNamespace(sampling_params=None, structured_output_request=None)
    manager.grammar_init(request)
    assert manager.made == []
