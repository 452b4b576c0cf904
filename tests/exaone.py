# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as EXAONE 3.5 names their parts, made from Llama's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

TWIN = "llama"
"""Below an EXAONE checkpoint: the Llama it was made from, which Hugging Face's own code runs."""

_FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_PARTS = (
    ("model.layers.", "transformer.h."),
    ("model.embed_tokens.", "transformer.wte."),
    ("model.norm.", "transformer.ln_f."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".self_attn.o_proj.", ".attn.attention.out_proj."),
    (".self_attn.", ".attn.attention."),
    (".gate_proj.", ".c_fc_0."),
    (".up_proj.", ".c_fc_1."),
    (".down_proj.", ".c_proj."),
)


def rename_to_exaone(directory: Path) -> None:
    """Make the Llama checkpoint in `directory` one of EXAONE's, and keep it below as `TWIN`."""
    twin = directory / TWIN
    twin.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(directory / name, twin / name)
    weights = load_file(directory / "model.safetensors")
    save_file({_renamed(n): w for n, w in weights.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config = {_FIELDS.get(name, name): value for name, value in config.items()}
    config |= {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone"}
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    # The code that the vendor ships beside the weights, which must not be asked for.
    config["auto_map"] = {"AutoConfig": "configuration_exaone.ExaoneConfig"}
    (directory / "config.json").write_text(json.dumps(config))


def _renamed(name: str) -> str:
    for llama, exaone in _PARTS:
        name = name.replace(llama, exaone)
    return name
