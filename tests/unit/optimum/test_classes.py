# SPDX-License-Identifier: Apache-2.0
"""The classes of the API, `auto`, refusals and the documented table come from one table."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rbln_vllm.optimum as api
from rbln_vllm.devices import HOST
from rbln_vllm.models.architectures import ARCHITECTURES, Architecture, built, check_architecture
from rbln_vllm.optimum.classes import model_class
from rbln_vllm.startup.model_impl import ImplRequest, decide

BUILT = [row for row in ARCHITECTURES.values() if row.is_built]
GENERATING = (
    *("Llama", "Gemma", "Gemma2", "Phi", "OPT", "Mistral", "Exaone", "Qwen2", "Qwen3", "Qwen3Moe"),
    "GptOss",
)
POOLING = {
    "RBLNBertModel",
    "RBLNXLMRobertaModel",
    "RBLNRobertaForSequenceClassification",
    "RBLNXLMRobertaForSequenceClassification",
    "RBLNQwen3Model",
    "RBLNQwen3ForSequenceClassification",
}


def base_of(row: Architecture) -> str:
    if row.only_pools:
        kind = "SequenceClassification" if row.classifies else "FeatureExtraction"
        return f"RBLNModelFor{kind}"
    return "RBLNModelForCausalLM"


def test_names_are_those_of_the_table() -> None:
    assert set(api.MODEL_CLASSES) == {row.class_name for row in BUILT}
    assert {f"RBLN{name}ForCausalLM" for name in GENERATING} <= set(api.__all__)
    assert set(api.__all__) >= POOLING
    assert dir(api) == sorted(api.__all__)
    assert all(getattr(api, name) is not None for name in api.__all__)


@pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
def test_a_row_is_a_class_an_auto_choice_and_a_documented_line(row: Architecture) -> None:
    made = getattr(api, row.class_name)
    assert issubclass(made, getattr(api, base_of(row)))
    assert made is model_class(row.class_name)
    assert (made.__name__, made.__module__) == (row.class_name, "rbln_vllm.optimum")
    assert pickle.loads(pickle.dumps(made)) is made
    assert check_architecture([row.name]) is row
    request = ImplRequest("auto", {}, None, None, "m", lambda: [row.name], HOST)
    assert decide(request).impl == "transformers"
    page = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text()
    assert f"`{row.class_name}`" in page


@pytest.mark.parametrize("name", [row.name for row in ARCHITECTURES.values() if not row.is_built])
def test_a_refused_row_is_no_class_and_no_auto_choice(name: str) -> None:
    assert not hasattr(api, f"RBLN{name}")
    with pytest.raises(AttributeError, match="there is no class"):
        model_class(f"RBLN{name}")
    with pytest.raises(ValueError, match=name):
        check_architecture([name])
    request = ImplRequest("auto", {}, None, None, "m", lambda: [name], HOST)
    assert decide(request).impl == "vllm"
    assert name not in built()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RBLNBert'"):
        _ = api.RBLNBert
    with pytest.raises(AttributeError, match="RBLNAutoModelForCTC is not built: the classes that"):
        _ = api.RBLNAutoModelForCTC


@pytest.mark.parametrize("name", api.AUTO_CLASSES)
def test_auto_has_no_instances(name: str) -> None:
    with pytest.raises(OSError, match=rf"is made by {name}.from_pretrained"):
        getattr(api, name)()


def test_importing_costs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, rbln_vllm.optimum; print({'torch', 'vllm', 'transformers'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
