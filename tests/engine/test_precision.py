# SPDX-License-Identifier: Apache-2.0
"""How far logits are from Hugging Face's, for each architecture of this implementation.

The truth is the eager model in float32. In float32 ours are within 1e-4 of the largest logit. In
bfloat16 they are, in the root mean square, at most `MORE_NOISE` times as far as eager bfloat16's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_vllm.models.architectures import Task, built
from tests.engine.bf16_rule import MORE_NOISE
from tests.engine.engines import CHUNK, prompt
from tests.engine.logits import Stepper
from tests.oracle import load_model

TOKENS = prompt(2 * CHUNK + 20, seed=11)
"""Two whole chunks, a short one, and what is decoded."""
DECODED = 9
RELATIVE = 1e-4


@torch.inference_mode()
def eager(directory: Path, dtype: torch.dtype) -> Tensor:
    logits_NV: Tensor = load_model(directory, dtype)(torch.tensor([TOKENS])).logits[0].float()
    return logits_NV


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("name", built(Task.GENERATE))
def test_logits(tiny_model_dir: Callable[..., Path], name: str) -> None:
    directory = tiny_model_dir(name)
    truth, rounded = (eager(directory, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = Stepper(directory, torch.float32).logits(TOKENS, DECODED)
    worst = float((ours - truth).abs().max() / truth.abs().max())
    assert worst < RELATIVE, f"fp32 logits are {worst:.1e} of the largest off"
    ours = Stepper(directory, torch.bfloat16).logits(TOKENS, DECODED)
    noise, allowed = rms(ours - truth), MORE_NOISE * rms(rounded - truth)
    assert noise < allowed, f"bf16 logits are {noise:.4f} off, eager's {allowed / MORE_NOISE:.4f}"
