# SPDX-License-Identifier: Apache-2.0
"""What a configuration of a pooling model (embed, classify, score) asks of programs and steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_vllm.models.architectures import ARCHITECTURES, Architecture

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ENCODER_STEP_TOKENS = 1024
"""Tokens of a step, unless a sequence may be longer. More would only be slower to answer: from a
few hundred on, weights are read often enough to be free."""


@dataclass(frozen=True)
class Pooling:
    """``is_encoder``: tokens see those after them, so that a step computes whole prompts of up to
    ``step_tokens`` tokens together and keeps no KV. ``has_head``: a classifier follows.
    """

    is_encoder: bool
    has_head: bool
    step_tokens: int

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ValueError(f"a step needs a token: {self}")

    @classmethod
    def compiled(cls, row: Architecture, step_tokens: int) -> "Pooling | None":
        """Of a model that is compiled ahead of time; None for one that generates text."""
        if not row.only_pools:
            return None
        return cls(row.encoder, row.classifies, step_tokens)


def is_pooling(model: "ModelConfig") -> bool:
    """Whether the model pools hidden states in place of generating text."""
    return bool(model.runner_type == "pooling")


def is_encoder_only(model: "ModelConfig") -> bool:
    return is_pooling(model) and bool(model.attn_type == "encoder_only")


def classifies(model: "ModelConfig") -> bool:
    """Whether its architecture ends in a classifier."""
    rows = (ARCHITECTURES[name] for name in model.architectures if name in ARCHITECTURES)
    return any(row.classifies for row in rows)


def pooling_of(vllm_config: "VllmConfig") -> Pooling | None:
    """None for a model that generates text."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not is_pooling(model):
        return None
    limits = (scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens)
    return Pooling(
        is_encoder=is_encoder_only(model),
        has_head=classifies(model),
        step_tokens=min(int(limit) for limit in limits if limit),
    )


def positions_of(config: Any) -> int | None:
    """Positions that tokens of a RoBERTa can have, by its configuration; None for other models.

    Its table begins with rows for padding, that of the padding id the last of them.
    """
    if getattr(config, "model_type", None) not in ("roberta", "xlm-roberta"):
        return None
    return int(config.max_position_embeddings) - int(config.pad_token_id) - 1


def encoder_step_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """Tokens of an encoder's step where nobody says how many."""
    return max(max_model_len, max_num_seqs, ENCODER_STEP_TOKENS)
