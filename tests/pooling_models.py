# SPDX-License-Identifier: Apache-2.0
"""Tiny random pooling models, and the oracle of what they must give: Hugging Face eager."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.models import CACHE, END_OF_TURN, ROOT, VOCAB_SIZE, make_aside, make_tokenizer

MINILM = ROOT / ".models" / "all-MiniLM-L6-v2"
HIDDEN, LABELS = 64, 3
POSITIONS = 72
"""Rows of an encoder's table of positions."""

_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_BERT = {"model_type": "bert", "type_vocab_size": 2, **_ENCODER, "pad_token_id": 0}
_ROBERTA = {"model_type": "roberta", "type_vocab_size": 1, **_ENCODER}
# Checkpoints of XLM-RoBERTa say how positions are embedded, and vLLM asks.
_XLM = {**_ROBERTA, "model_type": "xlm-roberta", "position_embedding_type": "absolute"}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LABELS = {"num_labels": LABELS}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "BertModel": _BERT,
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _XLM,
    "BertForSequenceClassification": {**_BERT, **_LABELS},
    "RobertaForSequenceClassification": {**_ROBERTA, **_LABELS},
    "XLMRobertaForSequenceClassification": {**_XLM, **_LABELS},
    "Qwen3Model": _QWEN3,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3ForSequenceClassification": {**_QWEN3, **_LABELS},
}


def pooling_model_dir(architecture: str, pooling: str | None = None, **overrides: Any) -> Path:
    """A tiny random fp32 model of `architecture`; made once.

    `pooling` ("mean", "cls") writes what Sentence-Transformers keeps of a model that pools so and
    normalises. `overrides` change fields of its configuration.
    """
    fields = {**ARCHITECTURES[architecture], **overrides}
    recipe = json.dumps([architecture, pooling, fields], sort_keys=True)
    recipe += Path(__file__).read_text()
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    target = CACHE / f"{architecture}-{key}"
    if not target.exists():
        make_aside(target, lambda scratch: _write(scratch, architecture, fields, pooling))
    return target


def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, made once by scripts/make_minilm.py."""
    if not MINILM.exists():
        script = ROOT / "scripts" / "make_minilm.py"
        subprocess.run([sys.executable, script, MINILM], check=True)
    return MINILM


def auto_class(architecture: str) -> Any:
    if architecture.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if architecture.endswith("ForCausalLM") else AutoModel


def _write(directory: Path, architecture: str, fields: dict[str, Any], pooling: str | None) -> None:
    config = AutoConfig.for_model(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = auto_class(architecture).from_config(config, dtype=torch.float32)
        _randomise(model)
    model.save_pretrained(directory)
    pair_tokenizer().save_pretrained(directory)
    if pooling is not None:
        _write_sentence_transformers(directory, pooling)


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """The tests' tokenizer, with BERT's way of putting two texts together."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    begin, end = tokenizer.convert_ids_to_tokens([1, 2])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, 1), (end, 2)],
    )
    return tokenizer


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Weights under which biases, norms and every layer matter."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if "embed" in name and parameter.ndim == 2:
            parameter.copy_(0.5 * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.add_(0.2 * noise)


def _write_sentence_transformers(directory: Path, pooling: str) -> None:
    base = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{base}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{base}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{base}.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    modes = {
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    folder = directory / "1_Pooling"
    folder.mkdir()
    config = {"word_embedding_dimension": HIDDEN, **modes}
    (folder / "config.json").write_text(json.dumps(config))


@functools.lru_cache(maxsize=2)
def eager(directory: Path, architecture: str) -> PreTrainedModel:
    model: PreTrainedModel = auto_class(architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def hidden_states(directory: Path, architecture: str, tokens: Sequence[int]) -> Tensor:
    """Of one sequence, `[n, hidden]`."""
    model = eager(directory, architecture)
    hidden_NH: Tensor = model.base_model(torch.tensor([list(tokens)])).last_hidden_state[0]
    return hidden_NH


def embedding(directory: Path, architecture: str, tokens: Sequence[int], pooling: str) -> Tensor:
    """`pooling` is cls, mean or last; normalised."""
    hidden_NH = hidden_states(directory, architecture, tokens)
    pooled_H = {"cls": hidden_NH[0], "mean": hidden_NH.mean(0), "last": hidden_NH[-1]}[pooling]
    return functional.normalize(pooled_H, dim=-1)


@torch.inference_mode()
def label_logits(
    directory: Path, architecture: str, tokens: Sequence[int], segments: Sequence[int] = ()
) -> Tensor:
    """A classifier's logits of one sequence, `[labels]`."""
    more = {"token_type_ids": torch.tensor([list(segments)])} if segments else {}
    ids = torch.tensor([list(tokens)])
    logits_L: Tensor = eager(directory, architecture)(ids, **more).logits[0].float()
    return logits_L
