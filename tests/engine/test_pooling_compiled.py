# SPDX-License-Identifier: Apache-2.0
"""Pooling models compiled ahead of time: run by themselves as Hugging Face's, and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_vllm.cli.main import main
from rbln_vllm.optimum import (
    RBLNAutoModel,
    RBLNAutoModelForCausalLM,
    RBLNAutoModelForSequenceClassification,
    RBLNBertModel,
    RBLNQwen3ForSequenceClassification,
    RBLNQwen3Model,
)
from tests.engine.engines import environment, prompt, report
from tests.engine.test_pooling import RERANKER, assert_near, classify, embed, pooling_engine
from tests.pooling_models import (
    eager,
    embedding,
    hidden_states,
    label_logits,
    minilm_dir,
    pooling_model_dir,
)

MAX_LEN, CHUNK, BLOCK = 64, 64, 32
LENGTHS = (1, 15, 16, 17, MAX_LEN - 1, MAX_LEN)
DECODER_LENGTHS = (1, BLOCK, CHUNK, CHUNK + 1, 130)
ENCODER: dict[str, Any] = {
    "rbln_batch_size": 2,
    "rbln_max_seq_len": MAX_LEN,
    "rbln_prefill_chunk_size": 128,
}
DECODER: dict[str, Any] = {
    "rbln_batch_size": 2,
    "rbln_max_seq_len": 256,
    "rbln_prefill_chunk_size": CHUNK,
    "rbln_kvcache_block_size": BLOCK,
}
# What the directory decides is not asked for.
UNSAID: dict[str, Any] = {
    "dtype": "auto",
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
}


def right_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, as BERT's tokenizers give them; padding is a token that means something."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*p, *[7] * (width - len(p))] for p in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    return ids, mask


def check_hidden_states(model: Any, directory: Path, name: str, lengths: Sequence[int]) -> None:
    """More rows than the batch, of all lengths; what is padding is 0."""
    prompts = [prompt(length, seed=4) for length in lengths]
    ids, mask = right_padded(prompts)
    found = model(ids, attention_mask=mask).last_hidden_state
    assert found.shape[:2] == ids.shape
    assert not found[mask == 0].any()
    for tokens, hidden_SH in zip(prompts, found, strict=True):
        assert_near([hidden_SH[: len(tokens)]], [hidden_states(directory, name, tokens)])


class TestByThemselves:
    @pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel"])
    def test_encoders(self, name: str) -> None:
        directory = pooling_model_dir(name)
        model = RBLNAutoModel.from_pretrained(directory, **ENCODER)
        assert type(model).__name__ == f"RBLN{name}"
        check_hidden_states(model, directory, name, LENGTHS)
        with pytest.raises(ValueError, match="65 tokens are more than the model's max_seq_len 64"):
            model(torch.tensor([prompt(MAX_LEN + 1)]))
        with pytest.raises(ValueError, match="no token that is not padding"):
            model(torch.tensor([[5]]), attention_mask=torch.tensor([[0]]))

    def test_a_decoder(self) -> None:
        """Of a checkpoint that would also generate text."""
        directory = pooling_model_dir("Qwen3ForCausalLM")
        with pytest.warns(UserWarning, match="is compiled as Qwen3Model"):
            model = RBLNQwen3Model.from_pretrained(directory, **DECODER)
        assert model.config.architectures == ["Qwen3Model"]
        prompts = [prompt(length, seed=4) for length in DECODER_LENGTHS]
        ids, mask = right_padded(prompts)
        found = model(ids, attention_mask=mask).last_hidden_state
        for tokens, hidden_SH in zip(prompts, found, strict=True):
            expected = hidden_states(directory, "Qwen3ForCausalLM", tokens)
            assert_near([hidden_SH[: len(tokens)]], [expected])

    @pytest.mark.parametrize(
        "name",
        [
            "BertForSequenceClassification",
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
            "Qwen3ForSequenceClassification",
        ],
    )
    def test_classifiers(self, name: str) -> None:
        directory, sizes = pooling_model_dir(name), DECODER if "Qwen3" in name else ENCODER
        model = RBLNAutoModelForSequenceClassification.from_pretrained(directory, **sizes)
        prompts = [prompt(length, seed=4) for length in LENGTHS]
        ids, mask = right_padded(prompts)
        found = model(ids, attention_mask=mask).logits
        assert_near(list(found), [label_logits(directory, name, tokens) for tokens in prompts])

    @torch.inference_mode()
    def test_segments(self) -> None:
        directory, name = pooling_model_dir("BertModel"), "BertModel"
        ids, types = torch.tensor([prompt(20)]), torch.tensor([[0] * 9 + [1] * 11])
        model = RBLNBertModel.from_pretrained(directory, **ENCODER)
        found = model(ids, token_type_ids=types).last_hidden_state
        expected = eager(directory, name)(ids, token_type_ids=types).last_hidden_state
        assert_near([found], [expected])
        assert not torch.equal(found, model(ids).last_hidden_state)

    def test_the_original_reranker(self) -> None:
        directory, prompts = pooling_model_dir("Qwen3ForCausalLM"), [prompt(9), prompt(CHUNK + 1)]
        model = RBLNQwen3ForSequenceClassification.from_pretrained(
            directory, hf_overrides=RERANKER, **DECODER
        )
        ids, mask = right_padded(prompts)
        found = model(ids, attention_mask=mask).logits
        no, yes = answer_ids(directory)
        logits = [label_logits(directory, "Qwen3ForCausalLM", tokens)[-1] for tokens in prompts]
        assert_near(list(found), [(one[yes] - one[no])[None] for one in logits])


def answer_ids(directory: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer.convert_tokens_to_ids(token) for token in ("a", "e")]


class TestSavedAndLoaded:
    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Of a Sentence-Transformers model that pools by the mean; the original is gone."""
        root = tmp_path_factory.mktemp("pooling")
        original = shutil.copytree(pooling_model_dir("BertModel", "mean"), root / "original")
        model = RBLNBertModel.from_pretrained(original, rbln_create_runtimes=False, **ENCODER)
        with pytest.raises(RuntimeError, match="create_runtimes=False"):
            model(torch.tensor([[5]]))
        model.save_pretrained(root / "model")
        shutil.rmtree(original)
        return root / "model"

    def test_is_loaded(self, saved: Path) -> None:
        model = RBLNBertModel.from_pretrained(saved, export=False)
        directory = pooling_model_dir("BertModel", "mean")
        check_hidden_states(model, directory, "BertModel", (1, 17))

    def test_is_served_as_it_pools(self, saved: Path) -> None:
        """Its values win; how it pools is read beside it."""
        prompts, directory = [prompt(length) for length in LENGTHS], pooling_model_dir("BertModel")
        expected = [embedding(directory, "BertModel", tokens, "mean") for tokens in prompts]
        with (
            environment(VLLM_DISABLE_COMPILE_CACHE="1"),
            pooling_engine(saved, **UNSAID | {"max_num_seqs": 4}) as llm,
        ):
            assert_near(embed(llm, prompts), expected)
            config = llm.llm_engine.vllm_config
            assert config.scheduler_config.max_num_seqs == 2
            assert config.scheduler_config.max_num_scheduled_tokens == 128
            assert config.model_config.max_model_len == MAX_LEN
            assert report(llm)["compiled_after_ready"] == 0

    @pytest.mark.parametrize(
        ("auto", "words"),
        [
            (
                RBLNAutoModelForCausalLM,
                "compiled for RBLNBertModel, which RBLNAutoModelForCausalLM",
            ),
            (RBLNAutoModelForSequenceClassification, "compiled for RBLNBertModel, which"),
        ],
    )
    def test_another_auto_class_does_not_make_it(self, saved: Path, auto: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            auto.from_pretrained(saved)

    def test_another_class_is_another(self, saved: Path) -> None:
        with pytest.raises(NameError, match="is a model for RBLNBertModel, not for RBLNQwen3Model"):
            RBLNQwen3Model.from_pretrained(saved)

    def test_generation_is_refused(self, saved: Path) -> None:
        words = "--runner generate, but .* was compiled for RBLNBertModel"
        with (
            pytest.raises(ValueError, match=words),
            pooling_engine(saved, **UNSAID, runner="generate"),
        ):
            pass


def test_a_reranker_is_compiled_and_served(tmp_path: Path, capsys: Any) -> None:
    """The configuration that was overridden is in the directory: the server is told nothing."""
    directory, target = pooling_model_dir("Qwen3ForCausalLM"), tmp_path / "reranker"
    sizes = ["--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    overrides = ["--hf-overrides", json.dumps(RERANKER), "--block-size", "32", "--parallel", "2"]
    assert main(["compile", str(directory), "-o", str(target), *sizes, *overrides]) == 0
    assert main(["inspect", str(target), "--verify"]) == 0
    assert "head_b2_q1" in capsys.readouterr().out
    no, yes = answer_ids(directory)
    prompts = [prompt(length, seed=6) for length in DECODER_LENGTHS]
    logits = [label_logits(directory, "Qwen3ForCausalLM", tokens)[-1] for tokens in prompts]
    with pooling_engine(target, **UNSAID) as llm:
        scores = classify(llm, prompts)
    assert_near(scores, [torch.sigmoid(one[yes] - one[no])[None] for one in logits])


def test_minilm_pools_as_sentence_transformers(tmp_path: Path) -> None:
    """A real model, whose longest text is said beside it."""
    directory, target = minilm_dir(), tmp_path / "minilm"
    assert main(["compile", str(directory), "-o", str(target), "--max-num-seqs", "2"]) == 0
    texts = ["A short text.", "A second one is a little longer than that one was. " * 4]
    with pooling_engine(target, **UNSAID) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        assert llm.llm_engine.vllm_config.model_config.max_model_len == 256
    for output in outputs:
        expected = embedding(directory, "BertModel", output.prompt_token_ids, "mean")
        assert 1 - float(torch.tensor(output.outputs.embedding) @ expected) < 1e-3
