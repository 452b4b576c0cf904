# SPDX-License-Identifier: Apache-2.0
"""Driver of OpenVINO GenAI's continuous batching pipeline, computing in bf16."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engines.protocol import Engine, Settings, package_versions, random_prompt, serve

MAX_BATCHED_TOKENS = 2048


class OpenVinoEngine:
    """`settings.model` is a directory that optimum-cli exported, with its tokenizer."""

    def __init__(self, settings: Settings) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = settings.kv_gib
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "bf16"}
        self.pipe = genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
        self._config = genai.GenerationConfig
        self._request = 0

    def run(self, batch: int, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        prompts = [self._prompt(tokens_in) for _ in range(batch)]
        began = time.perf_counter()
        # The pipeline drops a request whose handle is gone.
        handles = [self._add(prompt, tokens_out) for prompt in prompts]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        took = time.perf_counter() - began
        _check_lengths(handles, tokens_out)
        return took

    def steps(self, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        handle = self._add(self._prompt(tokens_in), tokens_out)
        ends: list[float] = []
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            ends.append(time.perf_counter())
        _check_lengths([handle], tokens_out)
        # The last `tokens_out` steps gave one token each; those before read the prompt.
        return (ends[-1] - ends[-tokens_out]) / (tokens_out - 1)

    def _prompt(self, tokens: int) -> Any:
        import numpy as np
        import openvino as ov  # type: ignore[import-not-found]

        return ov.Tensor(np.array([random_prompt(tokens)], dtype=np.int64))

    def _add(self, prompt: Any, tokens: int) -> Any:
        config = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        self._request += 1
        return self.pipe.add_request(self._request, prompt, config)


def _check_lengths(handles: list[Any], tokens: int) -> None:
    """Raises RuntimeError when an answer is shorter than asked: its time would mean nothing."""
    lengths = {len(output.generated_ids) for handle in handles for output in handle.read_all()}
    if lengths != {tokens}:
        raise RuntimeError(f"asked for {tokens} tokens, got {sorted(lengths)}")


def start(settings: Settings) -> tuple[Engine, dict[str, Any]]:
    """The pipeline, read and compiled."""
    began = time.perf_counter()
    import openvino_genai  # noqa: F401

    imported = time.perf_counter()
    engine = OpenVinoEngine(settings)
    return engine, {
        "platform": "CPU",
        "precision": "bf16",
        "import_seconds": imported - began,
        "start_seconds": time.perf_counter() - imported,
        "packages": package_versions("openvino", "openvino-genai", "optimum-intel"),
    }


if __name__ == "__main__":
    serve(start)
