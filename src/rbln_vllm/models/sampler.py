# SPDX-License-Identifier: Apache-2.0
"""Sampler programs, for both model implementations: they read logits and no weight.

They are programs of their own, not the end of the logits programs. What a grammar allows is known
only after the forward pass has been started, prompt scores need logits and no token, and a step
whose rows are all greedy has its tokens from the logits program already. A further program costs
about 20 us a step.
"""

import torch
from torch import Tensor

import rbln_host.ops  # noqa: F401  (registers torch.ops.rbln)
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Captured, ModuleCompiler

WORD_BITS = 32
"""Tokens in a word of a bitmask."""


def is_sampler(key: ProgramKey) -> bool:
    return key.role in (Role.SAMPLER, Role.DRAW)


def capture_sampler(
    key: ProgramKey, compiler: ModuleCompiler, vocab_size: int, dtype: torch.dtype
) -> Captured:
    """Compile a sampler program for the logits that the model's logits programs give."""
    if key.role is Role.DRAW:
        return compiler.capture(_draw, draw_inputs(key, vocab_size, torch.float32), key.name)
    inputs = draw_inputs(key, vocab_size, dtype)
    words = -(-vocab_size // WORD_BITS)
    inputs["bitmask"] = torch.zeros(key.batch, words, dtype=torch.int32)
    return compiler.capture(_sample, inputs, key.name)


def draw_inputs(key: ProgramKey, vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits and each row's parameters, by the names of the program's inputs."""
    return {
        "logits": torch.zeros(key.batch, vocab_size, dtype=dtype),
        "temperature": torch.zeros(key.batch),
        "top_k": torch.zeros(key.batch, dtype=torch.int32),
        "top_p": torch.zeros(key.batch),
        "seed": torch.zeros(key.batch, dtype=torch.int64),
        "position": torch.zeros(key.batch, dtype=torch.int64),
    }


def _draw(
    *,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """Next token of each row, and the least logit that could be drawn."""
    drawn: tuple[Tensor, Tensor] = torch.ops.rbln.sample(
        logits, temperature, top_k, top_p, seed, position
    )
    return drawn


def _sample(*, logits: Tensor, bitmask: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the tokens that ``bitmask`` allows; the logits of others become -infinity."""
    torch.ops.rbln.mask_tokens(bitmask, logits)
    return _draw(logits=logits, **parameters)
