# SPDX-License-Identifier: Apache-2.0
"""Model directories for tests: tiny random ones of several architectures, and SmolLM2.

A tiny model is made once per checkout below `.cache/test-models`, keyed by its configuration and
by this file, and appears in one rename. Its greedy text varies (see tests/engine/test_models.py),
never ends by itself and decodes to ASCII, so that tests can count tokens and compare text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.exaone import rename_to_exaone

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "test-models"
SMOLLM2 = ROOT / ".models" / "SmolLM2-135M-Instruct"

VOCAB_SIZE = 512
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# Heads of 32: vLLM's attention backends accept no smaller ones.
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **_HEADS}
_WIDE = {**_SMALL, "hidden_size": 128, "tie_word_embeddings": False}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **_SMALL},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None, **_SMALL},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **_WIDE},
    "Qwen3ForCausalLM": {"model_type": "qwen3", **_SMALL},
    "GemmaForCausalLM": {"model_type": "gemma", **_SMALL},
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        **_SMALL,
    },
    "Exaone4ForCausalLM": {
        "model_type": "exaone4",
        "sliding_window": 48,
        "sliding_window_pattern": 2,
        **_SMALL,
        "hidden_size": 128,
    },
    "ExaoneForCausalLM": {
        "model_type": "llama",  # then renamed, see _write_tiny_model
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **_SMALL,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **_SMALL,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 48,
        "rope_parameters": {  # vLLM's GptOss takes no other kind
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        **_SMALL,
    },
    "PhiForCausalLM": {
        "model_type": "phi",
        **_WIDE,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "GPT2LMHeadModel": {
        "model_type": "gpt2",
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
}


def tiny_model_dir(architecture: str, **overrides: Any) -> Path:
    """A tiny random float32 model of `architecture` with a tokenizer; made once.

    `overrides` change fields of its configuration. Raises `KeyError` for an unknown architecture.
    """
    fields = {**_COMMON, **ARCHITECTURES[architecture], **overrides}
    recipe = json.dumps(fields, sort_keys=True) + Path(__file__).read_text()
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    target = CACHE / f"{architecture}-{key}"
    if not target.exists():
        make_aside(target, lambda scratch: _write_tiny_model(scratch, architecture, fields))
    return target


def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct (bfloat16), made once by the script that `make model` runs."""
    if not SMOLLM2.exists():
        script = ROOT / "scripts" / "make_smollm2.py"
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        subprocess.run([sys.executable, script, SMOLLM2], check=True, env=environment)
    return SMOLLM2


def make_aside(target: Path, write: Callable[[Path], None]) -> None:
    """Create `target` in one rename; of two processes at once the later one yields."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    try:
        write(scratch)
        os.rename(scratch, target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_tiny_model(directory: Path, architecture: str, fields: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if architecture == "ExaoneForCausalLM":
        rename_to_exaone(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCAB_SIZE` tokens, learned from this repository's licence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "LICENSE").read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        chat_template=CHAT_TEMPLATE,
    )


@torch.no_grad()
def _randomise(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights under which biases and norms matter and greedy text varies.

    The usual initialisation has zero biases, and layers too weak to leave the input token behind,
    so that a model with tied embeddings repeats it for ever.
    """
    # Where a norm follows a layer it hides the layer's weights: there the norm must be strong.
    sandwich = any("post_feedforward_layernorm" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if "embed" in name or "wte" in name or "wpe" in name or "lm_head.weight" in name:
            parameter.copy_(0.3 * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * 4.0 / min(parameter.shape) ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:  # a norm's weight, around 1 or, in Gemma, around 0
            parameter.add_(0.2 * noise + (10.0 if sandwich and "post_" in name else 0.0))
    output = cast(torch.nn.Linear, cast(Any, model).get_output_embeddings())
    output.weight[_unwanted_tokens(tokenizer)] = 0.0
    if output.bias is not None:
        output.bias[_unwanted_tokens(tokenizer)] = 0.0


def _unwanted_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Special tokens and tokens that alone are no ASCII text: with a logit of 0 none is greedy."""
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)}
    special = set(tokenizer.all_special_ids)
    return [i for i, text in texts.items() if i in special or not text.isascii()]
