# SPDX-License-Identifier: Apache-2.0
"""What a step must at least read and compute, and so how long it takes at the machine's limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = 2  # bf16 and fp16, weights and KV cache alike


@dataclass(frozen=True)
class Work:
    """The least an engine does for a figure: bytes read, operations, and tokens that come of it."""

    read_bytes: float
    flop: float
    tokens: int


@dataclass(frozen=True)
class Limits:
    """Measured by `limits.py`: bytes and operations per second."""

    bytes_per_s: float
    flop_per_s: float

    def __post_init__(self) -> None:
        if min(self.bytes_per_s, self.flop_per_s) <= 0:
            raise ValueError(f"a limit must be positive: {self}")

    def seconds(self, work: Work) -> float:
        """The least time of work whose reading and computing overlap perfectly."""
        return max(work.read_bytes / self.bytes_per_s, work.flop / self.flop_per_s)


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped heads and a gated MLP (Llama and its like)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    def __post_init__(self) -> None:
        if min(self.__dict__.values()) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"not the shape of a model: {self}")

    @property
    def layer_parameters(self) -> int:
        """Matrix parameters of one layer; norms are left out, they are a thousandth of it."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read_parameters(self) -> int:
        """Parameters that every decode step reads: all layers and the output matrix."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES

    def decode_work(self, batch: int, context: float) -> Work:
        """A step of `batch` sequences with `context` tokens each."""
        return Work(
            read_bytes=self.read_parameters * BYTES + batch * context * self.kv_bytes_per_token,
            flop=batch * (2 * self.read_parameters + self._attention_flop(context)),
            tokens=batch,
        )

    def prefill_work(self, tokens: int) -> Work:
        """A prompt read at once; only its last token needs the output matrix."""
        layers = 2 * self.layers * self.layer_parameters * tokens
        attention = self._attention_flop(tokens / 2) * tokens
        return Work(
            read_bytes=self.read_parameters * BYTES,
            flop=layers + attention + 2 * self.vocab * self.hidden,
            tokens=tokens,
        )

    def _attention_flop(self, context: float) -> float:
        """Operations of one token's scores and weighted values."""
        return 4 * self.layers * self.heads * self.head_size * context


def read_shape(model: Path) -> ModelShape:
    """The shape in `config.json` of a model directory. Raises OSError or KeyError without it."""
    return shape_from_config(json.loads((model / "config.json").read_text()))


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """Raises KeyError naming the entry that a configuration lacks."""
    heads = config["num_attention_heads"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
    )
