# SPDX-License-Identifier: Apache-2.0
"""What a configuration of a pooling model (embed, classify, score) asks of programs and steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rbln_vllm.models.architectures import ARCHITECTURES, Task

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


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


def is_pooling(model: "ModelConfig") -> bool:
    """Whether the model pools hidden states in place of generating text."""
    return bool(model.runner_type == "pooling")


def is_encoder_only(model: "ModelConfig") -> bool:
    return is_pooling(model) and bool(model.attn_type == "encoder_only")


def classifies(model: "ModelConfig") -> bool:
    """Whether its architecture ends in a classifier."""
    rows = (ARCHITECTURES[name] for name in model.architectures if name in ARCHITECTURES)
    return any(Task.CLASSIFY in row.tasks for row in rows)


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
