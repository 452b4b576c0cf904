# SPDX-License-Identifier: Apache-2.0
"""Driver of llama.cpp through the low-level functions of llama-cpp-python.

Sequences are decoded side by side in one batch, as llama.cpp's own server does it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engines.protocol import Engine, Settings, package_versions, random_prompt, serve

BATCH_TOKENS = 2048


class LlamaCppEngine:
    """`settings.model` is a GGUF file; each sequence has `max_model_len` places of its own."""

    def __init__(self, settings: Settings) -> None:
        """Raises RuntimeError when llama.cpp refuses the file or the sizes."""
        import llama_cpp  # type: ignore[import-not-found]

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        path = settings.model.encode()
        self.model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {settings.model}")
        self.context = llama_cpp.llama_init_from_model(self.model, self._parameters(settings))
        if not self.context:
            raise RuntimeError(f"llama.cpp refuses {settings}")
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, batch: int, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        prompts = [random_prompt(tokens_in) for _ in range(batch)]
        began = time.perf_counter()
        tokens = self._prefill(prompts)
        self._decode(tokens, tokens_in, tokens_out - 1)
        return time.perf_counter() - began

    def steps(self, tokens_in: int, tokens_out: int) -> float:
        """See `protocol.Engine`."""
        tokens = self._prefill([random_prompt(tokens_in)])
        began = time.perf_counter()
        self._decode(tokens, tokens_in, tokens_out - 1)
        return (time.perf_counter() - began) / (tokens_out - 1)

    def _parameters(self, settings: Settings) -> Any:
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = settings.max_model_len * settings.max_num_seqs
        parameters.n_seq_max = settings.max_num_seqs
        parameters.n_batch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        return parameters

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read prompts from an empty cache; returns the first new token of each."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        return [self._read_prompt(sequence, prompt) for sequence, prompt in enumerate(prompts)]

    def _read_prompt(self, sequence: int, prompt: Sequence[int]) -> int:
        for start in range(0, len(prompt), BATCH_TOKENS):
            piece = prompt[start : start + BATCH_TOKENS]
            self._fill([(token, start + i, sequence) for i, token in enumerate(piece)])
            self.batch.logits[len(piece) - 1] = True
            self._run_batch()
        return self._best(-1)

    def _decode(self, tokens: list[int], position: int, steps: int) -> None:
        for step in range(steps):
            self._fill([(token, position + step, row) for row, token in enumerate(tokens)])
            for row in range(len(tokens)):
                self.batch.logits[row] = True
            self._run_batch()
            tokens = [self._best(row) for row in range(len(tokens))]

    def _fill(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Rows of (token, position, sequence), none of them asking for logits."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = False

    def _run_batch(self) -> None:
        code = self.api.llama_decode(self.context, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocab,))))


def start(settings: Settings) -> tuple[Engine, dict[str, Any]]:
    """The model, loaded; precision is what the file holds."""
    began = time.perf_counter()
    import llama_cpp

    imported = time.perf_counter()
    engine = LlamaCppEngine(settings)
    features = llama_cpp.llama_print_system_info().decode()
    return engine, {
        "platform": features.strip(),
        "precision": "4 bit" if "q4" in settings.model.lower() else "bf16",
        "import_seconds": imported - began,
        "start_seconds": time.perf_counter() - imported,
        "packages": package_versions("llama-cpp-python"),
    }


if __name__ == "__main__":
    serve(start)
