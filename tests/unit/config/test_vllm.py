# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself does with our config object and engine arguments."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from rbln_vllm import envs
from rbln_vllm.config import RBLNConfig
from rbln_vllm.devices import HOST
from rbln_vllm.models.architectures import built
from rbln_vllm.startup import model_impl
from rbln_vllm.startup.model_impl import ImplDecision, ImplRequest

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """None of our variables; what vLLM writes when a configuration is made goes again."""
    with patch.dict(os.environ):
        for row in envs.REGISTRY:
            os.environ.pop(row.name, None)
        yield


def _vllm_config(options: RBLNConfig) -> VllmConfig:
    from vllm.config import VllmConfig

    return VllmConfig(additional_config=options)


def test_vllm_config_carries_the_object_to_other_processes() -> None:
    options = RBLNConfig(max_prefill_run=3).as_resolved()
    config = _vllm_config(options)
    assert config.additional_config is options
    copy = pickle.loads(pickle.dumps(config)).additional_config
    assert copy == options
    assert copy.is_resolved
    assert copy.model_fields_set == {"max_prefill_run"}


def test_vllm_hashes_the_object() -> None:
    plain = _vllm_config(RBLNConfig().as_resolved()).compute_hash()
    assert _vllm_config(RBLNConfig(max_prefill_run=3).as_resolved()).compute_hash() == plain
    assert _vllm_config(RBLNConfig(enforce_model_fp32=True).as_resolved()).compute_hash() != plain


@pytest.fixture
def llama(tmp_path: Path) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The architectures of each request that reached `decide`."""
    requests: list[tuple[str, ...]] = []
    original = model_impl.decide

    def record(request: ImplRequest) -> ImplDecision:
        requests.append(tuple(request.hf_config_loader()))
        return original(request)

    monkeypatch.setattr(model_impl, "decide", record)
    return requests


def _rename(config: PretrainedConfig) -> PretrainedConfig:
    config.architectures = ["Renamed"]
    return config


@pytest.mark.parametrize(
    ("overrides", "architectures"),
    [
        ({}, ("LlamaForCausalLM",)),
        ({"architectures": ["Other"], "text_config": {"hidden_size": 1}}, ("Other",)),
        (_rename, ("Renamed",)),
    ],
)
def test_hf_overrides_apply_before_architectures_are_read(
    llama: str, seen: list[tuple[str, ...]], overrides: object, architectures: tuple[str, ...]
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=llama, hf_overrides=overrides)
    decision = model_impl.decide_from_engine_args(args, HOST)
    assert seen == [architectures]
    assert decision.impl == ("transformers" if architectures[0] in built() else "vllm")
    assert architectures[0] in decision.reason


def test_an_unreadable_model_is_left_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    warned: list[str] = []
    monkeypatch.setattr(model_impl, "_warn_once", warned.append)
    args = EngineArgs(model=str(tmp_path))
    decision = model_impl.decide_from_engine_args(args, HOST)
    assert decision.impl == "vllm"
    assert decision.warnings == tuple(warned)
    assert "cannot read the config" in warned[0]


def test_the_environment_reaches_the_decision(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_RBLN_USE_VLLM_MODEL", "0")
    decision = model_impl.decide_from_engine_args(EngineArgs(model=llama), HOST)
    assert (decision.impl, decision.selector) == ("transformers", model_impl.Selector.VARIABLE)
