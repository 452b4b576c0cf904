# SPDX-License-Identifier: Apache-2.0
"""The configuration of EXAONE 3 and 3.5, whose model is Llama's under other names.

Transformers has no such model type; the vendor's checkpoints carry code of their own, which is
neither needed nor run.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, LlamaConfig

MODEL_TYPE = "exaone"

_KEYS: Mapping[str, str] = {
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"^transformer\.h\.(\d+)\.ln_1\.": r"model.layers.\1.input_layernorm.",
    r"^transformer\.h\.(\d+)\.ln_2\.": r"model.layers.\1.post_attention_layernorm.",
    r"^transformer\.h\.(\d+)\.attn\.attention\.out_proj\.": r"model.layers.\1.self_attn.o_proj.",
    r"^transformer\.h\.(\d+)\.attn\.attention\.": r"model.layers.\1.self_attn.",
    r"^transformer\.h\.(\d+)\.mlp\.c_fc_0\.": r"model.layers.\1.mlp.gate_proj.",
    r"^transformer\.h\.(\d+)\.mlp\.c_fc_1\.": r"model.layers.\1.mlp.up_proj.",
    r"^transformer\.h\.(\d+)\.mlp\.c_proj\.": r"model.layers.\1.mlp.down_proj.",
}
"""Names of a checkpoint's weights (regular expressions) to Llama's."""


class ExaoneConfig(LlamaConfig):
    """Llama's configuration; EXAONE's names of its fields are aliases."""

    model_type = MODEL_TYPE
    attribute_map = {  # noqa: RUF012 (as Transformers declares it)
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    }


def key_mapping(config: Any) -> dict[str, str] | None:
    """``from_pretrained``'s argument of this name for a configuration; None to rename nothing."""
    return dict(_KEYS) if config.model_type == MODEL_TYPE else None


def register_config() -> None:
    """Let Transformers, and vLLM through it, read configurations of this type."""
    AutoConfig.register(MODEL_TYPE, ExaoneConfig, exist_ok=True)


def own_config(config: Any) -> Any:
    """``config``, or of EXAONE's the class above, whoever has read it."""
    if config.model_type != MODEL_TYPE:
        return config
    fields = config.to_dict()
    fields.pop("auto_map", None)  # where the checkpoint's own code is
    return ExaoneConfig(**fields)
