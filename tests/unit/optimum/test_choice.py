# SPDX-License-Identifier: Apache-2.0
"""As which architecture a model is compiled."""

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_vllm.models.architectures import Task
from rbln_vllm.optimum.choice import ANYTHING, RUNNERS, Wanted, choose_architecture


def choose(name: str, wanted: Wanted = ANYTHING, *, embeds: bool = False, kind: str = "") -> str:
    kinds = {"Qwen3": "qwen3", "Bert": "bert", "XLMR": "xlm-roberta", "Llama": "llama"}
    found = next((kinds[start] for start in kinds if name.startswith(start)), kind)
    config: Any = SimpleNamespace(architectures=[name], model_type=found)
    return choose_architecture(config, wanted, embeds=embeds).name


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "BertModel", "Qwen3ForSequenceClassification"]
)
def test_a_model_is_what_it_says(name: str) -> None:
    assert choose(name) == name
    assert choose(name, Wanted(name)) == name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_runner_that_is_the_models_own_changes_nothing(runner: str) -> None:
    name = {"generate": "Qwen3ForCausalLM", "pooling": "BertForSequenceClassification"}[runner]
    assert choose(name, RUNNERS[runner]) == name
    assert choose("BertForSequenceClassification", embeds=True) == "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("Qwen3ForCausalLM", RUNNERS["pooling"], "Qwen3Model"),
        ("Qwen3ForCausalLM", Wanted(tasks=frozenset({Task.EMBED})), "Qwen3Model"),
        (
            "Qwen3ForCausalLM",
            Wanted(tasks=frozenset({Task.CLASSIFY})),
            "Qwen3ForSequenceClassification",
        ),
        ("Qwen3ForCausalLM", Wanted("Qwen3Model"), "Qwen3Model"),
        ("BertForMaskedLM", Wanted("BertModel"), "BertModel"),
        ("BertForMaskedLM", RUNNERS["pooling"], "BertModel"),
        ("XLMRobertaForMaskedLM", Wanted(tasks=frozenset({Task.EMBED})), "XLMRobertaModel"),
        ("BertModel", Wanted("BertForSequenceClassification"), "BertForSequenceClassification"),
    ],
)
def test_another_class_reads_the_same_layers(name: str, wanted: Wanted, found: str) -> None:
    with pytest.warns(UserWarning, match=f"the model is of {name} and is compiled as {found}"):
        assert choose(name, wanted) == found


def test_a_sentence_transformers_model_embeds() -> None:
    with pytest.warns(UserWarning, match="is compiled as Qwen3Model"):
        assert choose("Qwen3ForCausalLM", embeds=True) == "Qwen3Model"
    with pytest.warns(UserWarning, match="is compiled as BertModel"):
        assert choose("BertForMaskedLM", embeds=True) == "BertModel"
    assert choose("LlamaForCausalLM", embeds=True) == "LlamaForCausalLM"
    assert choose("Qwen3ForCausalLM", RUNNERS["generate"], embeds=True) == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Qwen3Model", Wanted("Qwen3ForCausalLM")),
        ("LlamaForCausalLM", Wanted("BertModel")),
        ("LlamaForCausalLM", Wanted("ModelForCausalLM")),
    ],
)
def test_what_cannot_be_had_is_the_models_own(name: str, wanted: Wanted) -> None:
    """A head that is missing cannot be made up; the caller sees that the class is another."""
    assert choose(name, wanted) == name


@pytest.mark.parametrize(
    ("name", "wanted", "words"),
    [
        ("LlamaForCausalLM", RUNNERS["pooling"], "LlamaForCausalLM is not built for classify"),
        ("BertModel", RUNNERS["generate"], "BertModel is not built for generate: use a model of"),
        ("BertForMaskedLM", ANYTHING, "nothing for BertForMaskedLM"),
        ("MidmLMHeadModel", ANYTHING, "MidmLMHeadModel: its modules are not part"),
    ],
)
def test_what_there_is_not_is_refused(name: str, wanted: Wanted, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(name, wanted)
