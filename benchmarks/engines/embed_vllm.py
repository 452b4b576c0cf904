# SPDX-License-Identifier: Apache-2.0
"""vLLM's `LLM.embed` on whatever platform it resolves to; `embed_ours`, `embed_vllm_cpu` share it.

The precision comes from `BENCH_DTYPE`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.engines.protocol import Settings, package_versions


class VllmEmbedder:
    """The engine behind `LLM`, in the process layout that vLLM chooses by default."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises whatever vLLM raises when the model cannot be served so."""
        from vllm import LLM

        self.llm = LLM(
            settings.model,
            runner="pooling",
            dtype=dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
        )

    def embed(self, texts: list[str], shown: int) -> dict[str, Any]:
        """See `protocol.Embedder`."""
        began = time.perf_counter()
        outputs = self.llm.embed(texts, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        vectors = [list(output.outputs.embedding) for output in outputs[:shown]]
        return {"seconds": seconds, "tokens": tokens, "vectors": vectors}


def start(settings: Settings, expected_platform: str) -> tuple[VllmEmbedder, dict[str, Any]]:
    """Start and check that vLLM chose the platform that is to be measured.

    Raises RuntimeError naming the platform found.
    """
    from vllm.platforms import current_platform

    found = type(current_platform).__name__
    if found != expected_platform:
        raise RuntimeError(f"vLLM runs on {found}, not on {expected_platform}: check VLLM_PLUGINS")
    dtype = os.environ["BENCH_DTYPE"]
    packages = package_versions("rbln-vllm", "vllm-cpu", "torch", "transformers")
    about = {"platform": found, "precision": dtype, "packages": packages}
    return VllmEmbedder(settings, dtype), about
