# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rbln_vllm.config import ModelImpl, OptimumRBLNConfig, RBLNConfig
from rbln_vllm.devices import HOST, resolve_profile
from rbln_vllm.startup.model_impl import (
    ImplRequest,
    Selector,
    _auto,
    decide,
    is_compiled_directory,
    parse_model_impl,
)

ATOM = resolve_profile("RBLN-CA25")


def _never() -> NoReturn:
    raise AssertionError("the model config must not be read")


REQUEST = ImplRequest(
    model_impl="auto",
    additional_config={},
    env=None,
    published=None,
    model="some/model",
    hf_config_loader=lambda: ["LlamaForCausalLM"],
    profile=HOST,
    registry=frozenset({"LlamaForCausalLM"}),
)


@pytest.mark.parametrize(
    ("changes", "impl", "selector"),
    [
        # 1. An object beats everything below it.
        ({"additional_config": RBLNConfig()}, "vllm", Selector.OBJECT),
        ({"additional_config": OptimumRBLNConfig()}, "transformers", Selector.OBJECT),
        (
            {"additional_config": RBLNConfig(), "published": "transformers"},
            "vllm",
            Selector.OBJECT,
        ),
        ({"additional_config": RBLNConfig(), "model_impl": "vllm"}, "vllm", Selector.OBJECT),
        # 2. An explicit option.
        ({"model_impl": "vllm"}, "vllm", Selector.OPTION),
        ({"model_impl": "transformers"}, "transformers", Selector.OPTION),
        ({"model_impl": "optimum"}, "transformers", Selector.OPTION),
        ({"model_impl": "vllm", "published": "transformers"}, "vllm", Selector.OPTION),
        # 4. A parent's answer is looked at before the deprecated variable.
        ({"published": "vllm"}, "vllm", Selector.PARENT),
        ({"published": "vllm", "env": False}, "vllm", Selector.PARENT),
        # 3. The deprecated variable.
        ({"env": True}, "vllm", Selector.VARIABLE),
        ({"env": False}, "transformers", Selector.VARIABLE),
    ],
)
def test_explicit_rungs_do_not_read_the_model(
    changes: dict[str, Any], impl: ModelImpl, selector: Selector
) -> None:
    decision = decide(replace(REQUEST, hf_config_loader=_never, **changes))
    assert (decision.impl, decision.selector) == (impl, selector)
    assert decision.reason


@pytest.mark.parametrize(
    ("loader", "impl"),
    [
        (lambda: ["LlamaForCausalLM"], "transformers"),
        (lambda: ["Unknown", "LlamaForCausalLM"], "transformers"),
        (lambda: ["Unknown"], "vllm"),
        (list, "vllm"),
    ],
)
def test_auto_looks_for_the_architecture(loader: Callable[[], list[str]], impl: ModelImpl) -> None:
    decision = decide(replace(REQUEST, hf_config_loader=loader))
    assert (decision.impl, decision.selector) == (impl, Selector.AUTO)
    assert decision.warnings == ()


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("bad")])
def test_auto_with_an_unreadable_config_is_vllm_with_a_warning(error: Exception) -> None:
    def loader() -> NoReturn:
        raise error

    decision = decide(replace(REQUEST, hf_config_loader=loader))
    assert decision.impl == "vllm"
    assert str(error) in decision.warnings[0]


def test_auto_does_not_hide_other_errors() -> None:
    def loader() -> NoReturn:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        decide(replace(REQUEST, hf_config_loader=loader))


def test_an_artifact_directory_is_transformers(tmp_path: Path) -> None:
    (tmp_path / "rbln_config.json").write_text("{}")
    request = replace(REQUEST, model=str(tmp_path), hf_config_loader=_never)
    for decision in (_auto(request), decide(request)):
        assert decision.impl == "transformers"
        assert "holds a compiled model" in decision.reason
    with pytest.raises(ValueError, match=r"--model-impl vllm selects vllm, but .* transformers"):
        decide(replace(request, model_impl="vllm"))


def test_what_counts_as_an_artifact_directory(tmp_path: Path) -> None:
    assert not is_compiled_directory("")
    assert not is_compiled_directory(str(tmp_path))
    (tmp_path / "rbln_config.json").mkdir()
    assert not is_compiled_directory(str(tmp_path))


@pytest.mark.parametrize("value", ["terratorch", "VLLM", "", None, 3, ["vllm"]])
def test_unknown_values_are_refused_with_the_known_ones(value: object) -> None:
    with pytest.raises(ValueError, match="auto, vllm, transformers, optimum"):
        parse_model_impl(value)
    with pytest.raises(ValueError, match="unsupported model implementation"):
        decide(replace(REQUEST, model_impl=value, additional_config=RBLNConfig()))


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (RBLNConfig(), "transformers"),
        (RBLNConfig(), "optimum"),
        (OptimumRBLNConfig(), "vllm"),
    ],
)
def test_object_and_option_must_agree(config: object, option: str) -> None:
    with pytest.raises(ValueError, match="pass the matching class or leave --model-impl at auto"):
        decide(replace(REQUEST, additional_config=config, model_impl=option))


@pytest.mark.parametrize(
    ("changes", "env"),
    [
        ({"model_impl": "vllm"}, False),
        ({"model_impl": "optimum"}, True),
        ({"additional_config": RBLNConfig()}, False),
    ],
)
def test_explicit_answer_and_variable_must_agree(changes: dict[str, Any], env: bool) -> None:
    with pytest.raises(ValueError, match="unset VLLM_RBLN_USE_VLLM_MODEL"):
        decide(replace(REQUEST, env=env, **changes))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"env": True}, "vllm"),
        ({"env": False}, "optimum"),
        ({"env": True, "model_impl": "vllm"}, "vllm"),
    ],
)
def test_using_the_variable_is_warned_about(changes: dict[str, Any], flag: str) -> None:
    (warning,) = decide(replace(REQUEST, **changes)).warnings
    assert "VLLM_RBLN_USE_VLLM_MODEL is deprecated and removed in 0.14.0" in warning
    assert f"--model-impl {flag}" in warning


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"additional_config": RBLNConfig()}, "pass an OptimumRBLNConfig"),
        ({"model_impl": "vllm"}, "use --model-impl optimum"),
        ({"env": True}, "unset VLLM_RBLN_USE_VLLM_MODEL"),
        ({"published": "vllm"}, "start the parent process with --model-impl optimum"),
        ({"hf_config_loader": lambda: ["X"]}, "use a model the transformers implementation has"),
    ],
)
def test_atom_refuses_vllm_with_a_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match="RBLN-CA25 cannot run the vllm implementation") as caught:
        decide(replace(REQUEST, profile=ATOM, **changes))
    assert str(caught.value).endswith(remedy)


def test_atom_runs_transformers() -> None:
    assert decide(replace(REQUEST, profile=ATOM)).impl == "transformers"


def test_auto_prefers_what_the_table_has() -> None:
    request = ImplRequest("auto", {}, None, None, "some/model", lambda: ["LlamaForCausalLM"], HOST)
    assert decide(request).impl == "transformers"
    refused = replace(request, hf_config_loader=lambda: ["MidmLMHeadModel"])
    assert decide(refused).impl == "vllm"
