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
    return key.role in (Role.SAMPLER, Role.DRAW, Role.MASK)


def capture_sampler(
    key: ProgramKey, compiler: ModuleCompiler, vocab_size: int, dtype: torch.dtype
) -> Captured:
    """Compile a sampler program for the logits that the model's logits programs give."""
    if key.role is Role.DRAW:
        return compiler.capture(_draw, draw_inputs(key, vocab_size, torch.float32), key.name)
    words = -(-vocab_size // WORD_BITS)
    bitmask = {"bitmask": torch.zeros(key.batch, words, dtype=torch.int32)}
    if key.role is Role.MASK:
        logits = {"logits": torch.zeros(key.batch, vocab_size, dtype=dtype)}
        return compiler.capture(_mask, logits | bitmask, key.name)
    return compiler.capture(_draw, draw_inputs(key, vocab_size, dtype) | bitmask, key.name)


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
    bitmask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Next token of each row, of those that ``bitmask`` allows, and the least logit that could be
    drawn."""
    drawn: tuple[Tensor, Tensor] = torch.ops.rbln.sample(
        logits, temperature, top_k, top_p, seed, position, bitmask
    )
    return drawn


def _mask(*, logits: Tensor, bitmask: Tensor) -> tuple[()]:
    """The logits of tokens that ``bitmask`` forbids become -infinity."""
    torch.ops.rbln.mask_tokens(bitmask, logits)
    return ()
