# SPDX-License-Identifier: Apache-2.0
"""Several architectures through vLLM's own modules: tokens equal Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.parallel_state import destroy_model_parallel

from tests.engine.engines import (
    BLOCK,
    CHUNK,
    all_tokens,
    generate,
    greedy,
    own_process,
    prompt,
    report,
    runner_of,
    running_engine,
)
from tests.oracle import hf_greedy

LENGTHS = (1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 200)


@dataclass(frozen=True)
class Architecture:
    """`windows` are those of its layers, 0 for full attention; `overrides` change its config.

    `own_process` for models that vLLM runs through Transformers: it changes their classes in place,
    and the oracle of this process could not build them any more. A model with `experts` needs a
    process group that an engine of any other, which may have been the first here, does not make.
    """

    name: str
    windows: tuple[int, int] = (0, 0)
    overrides: dict[str, Any] = field(default_factory=dict)
    own_process: bool = False
    experts: bool = False

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, filter(None, self.windows))])


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", overrides={"tie_word_embeddings": True}),
    Architecture("Qwen2ForCausalLM"),  # biases in attention
    Architecture("Qwen3ForCausalLM"),  # norms of queries and keys
    Architecture("Gemma2ForCausalLM", (64, 0)),  # soft caps; a window in every second layer
    # Windows below, at and across block and chunk borders; a window alone and none.
    Architecture("MistralForCausalLM", (48, 48), {"sliding_window": 48}),
    Architecture("MistralForCausalLM", (BLOCK, BLOCK), {"sliding_window": BLOCK}),
    Architecture("MistralForCausalLM", (100, 100), {"sliding_window": 100}),
    Architecture("MistralForCausalLM"),
    # Half of each head rotates; attention and MLP are parallel.
    Architecture("PhiForCausalLM", own_process=True),
    Architecture("OPTForCausalLM"),  # learned positions with an offset
    Architecture("Qwen3MoeForCausalLM", experts=True),
    Architecture("GptOssForCausalLM", (48, 0), experts=True),  # with biases and limits; sinks
    Architecture("GPT2LMHeadModel"),  # learned positions
)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_tokens_equal_hugging_face(
    tiny_model_dir: Callable[..., Path], architecture: Architecture
) -> None:
    directory = tiny_model_dir(architecture.name, **architecture.overrides)
    prompts = [prompt(length, seed=5) for length in LENGTHS]
    # First, since vLLM changes the Hugging Face classes it builds Phi from.
    expected = [item.token_ids for item in hf_greedy(directory, prompts, 24, ignore_eos=True)]
    if architecture.experts:
        destroy_model_parallel()
    separate = own_process() if architecture.own_process else nullcontext()
    with separate, running_engine(directory) as llm:
        if not architecture.own_process:
            layers = runner_of(llm)._store.kv_layers
            assert tuple(layer.window for layer in layers) == architecture.windows
        cold = all_tokens(generate(llm, prompts, greedy(24)))
        warm = all_tokens(generate(llm, prompts, greedy(24)))  # now with prefix hits
        assert report(llm)["compiled_after_ready"] == 0
    assert cold == expected
    assert warm == expected
