# SPDX-License-Identifier: Apache-2.0
"""Tiny random drafters of each kind, and what each drafts by definition.

The oracles are plain torch over Hugging Face's modules: one sequence, no cache, no padding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from tests.models import VOCAB_SIZE

EAGLE3_LAYERS = (0, 1, 2)
EAGLE3_VOCAB = 200
WEIGHTS = "model.safetensors"


class DrafterOracle:
    """Drafts of one kind of drafter, from its checkpoint and the target's."""

    def __init__(self, target: Path, drafter: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.target: PreTrainedModel = model.eval()
        self.weights = {name: w.float() for name, w in load_file(drafter / WEIGHTS).items()}
        self.config = AutoConfig.from_pretrained(target)
        self.config._attn_implementation = "eager"

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens that follow ``tokens``."""
        states_LH = self.states(torch.tensor([tokens[:-1]]))
        embeds_LH = self._embed(tokens[1:])
        found: list[int] = []
        for _ in range(count):
            outputs_LH, carried_LH = self.forward(embeds_LH, states_LH)
            found.append(self.token(outputs_LH[-1]))
            embeds_LH = torch.cat((embeds_LH, self._embed(found[-1:])))
            states_LH = torch.cat((states_LH, carried_LH[-1:]))
        return found

    def states(self, tokens_1L: Tensor) -> Tensor:
        """The target's states that the drafter reads."""
        states: Tensor = cast(Any, self.target).model(tokens_1L).last_hidden_state[0]
        return states

    def forward(self, embeds_LH: Tensor, states_LH: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tokens: states for the head, states to carry on."""
        raise NotImplementedError

    def token(self, state_H: Tensor) -> int:
        return int(cast(Any, self.target).lm_head(state_H).argmax())

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        embeds: Tensor = self.target.get_input_embeddings()(torch.tensor(list(tokens)))
        return embeds

    def _loaded(self, module: torch.nn.Module, prefix: str) -> Any:
        own = {n.removeprefix(prefix): w for n, w in self.weights.items() if n.startswith(prefix)}
        module.load_state_dict(own)
        return module.eval()


def _attended(layer: Any, rotary: Any, x_LX: Tensor) -> Tensor:
    """Causal attention of a layer of Hugging Face's over the whole sequence."""
    length = x_LX.shape[0]
    mask_LL = torch.full((length, length), float("-inf")).triu(1)
    angles = rotary(x_LX[None], torch.arange(length)[None])
    attended: Tensor = layer.self_attn(
        hidden_states=x_LX[None], position_embeddings=angles, attention_mask=mask_LL[None, None]
    )[0]
    return attended[0]


class EagleOracle(DrafterOracle):
    """EAGLE: token and state through one linear layer, then a decoder layer without first norm."""

    def __init__(self, target: Path, drafter: Path) -> None:
        super().__init__(target, drafter)
        layer = LlamaDecoderLayer(self.config, 0)
        layer.input_layernorm = torch.nn.Identity()
        self.layer = self._loaded(layer, "layers.0.")
        self.rotary = LlamaRotaryEmbedding(self.config)

    def forward(self, embeds_LH: Tensor, states_LH: Tensor) -> tuple[Tensor, Tensor]:
        x_LH = linear(torch.cat((embeds_LH, states_LH), dim=-1), self.weights["fc.weight"])
        x_LH = x_LH + _attended(self.layer, self.rotary, x_LH)
        x_LH = x_LH + self.layer.mlp(self.layer.post_attention_layernorm(x_LH))
        return x_LH, x_LH


class Eagle3Oracle(DrafterOracle):
    """EAGLE-3: states of several layers, attention over token and state side by side."""

    def __init__(self, target: Path, drafter: Path) -> None:
        super().__init__(target, drafter)
        layer: Any = LlamaDecoderLayer(self.config, 0)
        layer.hidden_norm = LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            wide = torch.nn.Linear(2 * old.in_features, old.out_features, bias=False)
            setattr(layer.self_attn, name, wide)
        self.layer = self._loaded(layer, "midlayer.")
        norm = LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        self.norm = self._loaded(norm, "norm.")
        self.rotary = LlamaRotaryEmbedding(self.config)

    def states(self, tokens_1L: Tensor) -> Tensor:
        output = cast(Any, self.target).model(tokens_1L, output_hidden_states=True)
        layers = [output.hidden_states[layer][0] for layer in EAGLE3_LAYERS]
        return linear(torch.cat(layers, dim=-1), self.weights["fc.weight"])

    def forward(self, embeds_LH: Tensor, states_LH: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        sides = (layer.input_layernorm(embeds_LH), layer.hidden_norm(states_LH))
        x_LH = states_LH + _attended(layer, self.rotary, torch.cat(sides, dim=-1))
        x_LH = x_LH + layer.mlp(layer.post_attention_layernorm(x_LH))
        return self.norm(x_LH), x_LH

    def token(self, state_H: Tensor) -> int:
        draft = int(linear(state_H, self.weights["lm_head.weight"]).argmax())
        return draft + int(self.weights["d2t"][draft])


class MimoOracle(DrafterOracle):
    """MiMo's own prediction layer, which reads the states before the target's last norm."""

    def __init__(self, target: Path, drafter: Path) -> None:
        super().__init__(target, drafter)
        self._prefix = "model.mtp_layers.0."
        layer: Any = Qwen2DecoderLayer(self.config, 0)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(layer, name, LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps))
        hidden = self.config.hidden_size
        layer.input_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = self._loaded(layer, self._prefix)
        self.rotary = Qwen2RotaryEmbedding(self.config)

    def states(self, tokens_1L: Tensor) -> Tensor:
        seen: list[Tensor] = []
        norm = cast(Any, self.target).model.norm
        with norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0])):
            super().states(tokens_1L)
        return seen[0]

    def forward(self, embeds_LH: Tensor, states_LH: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        embeds_LH = torch.cat((torch.zeros_like(embeds_LH[:1]), embeds_LH[1:]))
        sides = (layer.hidden_layernorm(states_LH), layer.token_layernorm(embeds_LH))
        x_LH = layer.input_proj(torch.cat(sides, dim=-1))
        x_LH = x_LH + _attended(layer, self.rotary, layer.input_layernorm(x_LH))
        x_LH = x_LH + layer.mlp(layer.post_attention_layernorm(x_LH))
        outputs_LH: Tensor = layer.final_layernorm(x_LH)
        return outputs_LH, outputs_LH


class MedusaOracle(DrafterOracle):
    """Heads of one residual layer each, on the state of the last token before the newest."""

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        state_H = self.states(torch.tensor([tokens[:-1]]))[-1]
        found = []
        for head in range(count):
            block = self.weights[f"blocks.{head}.layers.0.weight"]
            x_H = state_H + silu(linear(state_H, block))
            found.append(int(linear(x_H, self.weights[f"lm_heads.{head}.weight"]).argmax()))
        return found


def make_eagle(target: Path, directory: Path) -> Path:
    """An EAGLE drafter for a Llama; it has the target's embedding and head."""
    config = _draft_config(target, directory, {"num_hidden_layers": 1})
    hidden = config["hidden_size"]
    weights = _layer(config, "layers.0.", hidden)
    return _save(directory, {**weights, "fc.weight": _random(hidden, 2 * hidden)})


def make_eagle3(target: Path, directory: Path) -> Path:
    """An EAGLE-3 drafter for a Llama of three layers, with a smaller vocabulary."""
    changes = {
        "num_hidden_layers": 1,
        "draft_vocab_size": EAGLE3_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS)},
    }
    config = _draft_config(target, directory, changes)
    hidden = config["hidden_size"]
    weights = {
        **_layer(config, "midlayer.", 2 * hidden),
        "midlayer.input_layernorm.weight": _norm(hidden),
        "midlayer.hidden_norm.weight": _norm(hidden),
        "fc.weight": _random(hidden, len(EAGLE3_LAYERS) * hidden),
        "norm.weight": _norm(hidden),
        "lm_head.weight": _random(EAGLE3_VOCAB, hidden),
        "d2t": torch.arange(EAGLE3_VOCAB),  # draft token i is the target's 2 * i
    }
    return _save(directory, weights)


def make_medusa(target: Path, directory: Path, heads: int) -> Path:
    """Medusa heads for a target."""
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": VOCAB_SIZE,
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = {f"blocks.{i}.layers.0.weight": _random(hidden, hidden) for i in range(heads)}
    weights |= {f"lm_heads.{i}.weight": _random(VOCAB_SIZE, hidden) for i in range(heads)}
    return _save(directory, weights)


def make_mimo(qwen2: Path, directory: Path) -> Path:
    """A MiMo: a Qwen2 with a prediction layer in its checkpoint."""
    shutil.copytree(qwen2, directory, dirs_exist_ok=True)
    config = _draft_config(
        qwen2,
        directory,
        {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    )
    hidden, prefix = config["hidden_size"], "model.mtp_layers.0."
    weights = _layer(config, prefix, hidden)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm"):
        weights[f"{prefix}{name}.weight"] = _norm(hidden)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        bias = _random(config[heads] * config["head_dim"], 1)[:, 0]
        weights[f"{prefix}self_attn.{name}_proj.bias"] = bias
    value_bias = weights[f"{prefix}self_attn.k_proj.bias"].clone()
    weights[f"{prefix}self_attn.v_proj.bias"] = value_bias
    weights[f"{prefix}input_proj.weight"] = _random(hidden, 2 * hidden)
    return _save(directory, {**load_file(qwen2 / WEIGHTS), **weights})


def _draft_config(target: Path, directory: Path, changes: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text()) | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return config


def _layer(config: dict[str, Any], prefix: str, width: int) -> dict[str, Tensor]:
    """The projections of one decoder layer, whose attention reads ``width`` elements."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * size, width),
        "self_attn.k_proj": (kv_heads * size, width),
        "self_attn.v_proj": (kv_heads * size, width),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {f"{prefix}{name}.weight": _random(*shape) for name, shape in shapes.items()}
    return {**weights, f"{prefix}post_attention_layernorm.weight": _norm(hidden)}


_GENERATOR = torch.Generator().manual_seed(7)


def _random(rows: int, columns: int) -> Tensor:
    weight: Tensor = torch.randn(rows, columns, generator=_GENERATOR) * 1.5 / columns**0.5
    return weight


def _norm(size: int) -> Tensor:
    return 1 + 0.2 * torch.randn(size, generator=_GENERATOR)


def _save(directory: Path, weights: dict[str, Tensor]) -> Path:
    save_file({name: w.contiguous() for name, w in weights.items()}, directory / WEIGHTS)
    return directory
