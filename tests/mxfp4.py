# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose experts are in MXFP4, and what their elements stand for, exactly.

Written from the OCP Microscaling Formats specification, version 1.0: an element has a sign, two
bits of exponent with bias 1 and one of mantissa (E2M1); 32 of them share a scale, a power of two
with bias 127 (E8M0). Two elements lie in a byte, the first in its low half.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
_EXPERTS = ("gate_up_proj", "down_proj")


def element(code: int) -> float:
    """The value of a four-bit code."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * 2.0 ** (exponent - 1) * (1 + mantissa / 2)


def decode(blocks_G16: Tensor, scales_G: Tensor) -> Tensor:
    """Values `[..., 32 * G]` in float64 of bytes `[..., G, 16]` and scales `[..., G]`."""
    table = torch.tensor([element(code) for code in range(16)], dtype=torch.float64)
    codes = torch.stack((blocks_G16 & 15, blocks_G16 >> 4), dim=-1).flatten(-2).long()
    powers = torch.pow(2.0, scales_G.double() - 127)
    return (table[codes] * powers[..., None]).flatten(-2)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales near to the values, whose last axis is a multiple of 32."""
    groups = values.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2  # the largest element is 6, in [4, 8)
    table = torch.tensor([element(code) for code in range(16)], dtype=torch.float64)
    scaled = groups / torch.pow(2.0, exponents)[..., None]
    codes = (scaled[..., None] - table).abs().argmin(dim=-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write_mxfp4(source: Path, target: Path) -> None:
    """A copy of a GptOss checkpoint whose experts are in MXFP4."""

    def split(name: str, weight: Tensor) -> dict[str, Tensor]:
        blocks, scales = encode(weight.transpose(1, 2))
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    config = _rewrite(source, target, split)
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (target / "config.json").write_text(json.dumps(config))


def write_decoded(source: Path, target: Path) -> None:
    """A copy of the checkpoint whose experts have the values that MXFP4 would give them."""

    def rounded(name: str, weight: Tensor) -> dict[str, Tensor]:
        decoded = decode(*encode(weight.transpose(1, 2))).transpose(1, 2)
        return {name: decoded.to(torch.bfloat16).contiguous()}

    (target / "config.json").write_text(json.dumps(_rewrite(source, target, rounded)))


def _rewrite(
    source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]]
) -> dict[str, object]:
    """Copy a model directory, its experts' weights changed and all else in bfloat16."""
    target.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            for name, weight in load_file(file).items():
                is_expert = name.endswith(_EXPERTS)
                changed = change(name, weight) if is_expert else {name: weight.bfloat16()}
                weights |= {key: value.contiguous() for key, value in changed.items()}
        else:
            shutil.copy(file, target)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config: dict[str, object] = json.loads((source / "config.json").read_text())
    return {**config, "dtype": "bfloat16"}
