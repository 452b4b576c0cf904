# SPDX-License-Identifier: Apache-2.0
"""Driver of Sentence-Transformers: its `encode` with its own batch size, in `BENCH_DTYPE`."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.engines.protocol import Embedder, Settings, package_versions, serve


class SentenceTransformersEmbedder:
    """`settings.model` is a Sentence-Transformers directory."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        from sentence_transformers import (  # type: ignore[import-not-found]
            SentenceTransformer,
        )

        self.model = SentenceTransformer(
            settings.model, device="cpu", model_kwargs={"dtype": dtype}
        )
        self.model.max_seq_length = settings.max_model_len

    def embed(self, texts: list[str], shown: int) -> dict[str, Any]:
        """See `protocol.Embedder`."""
        began = time.perf_counter()
        vectors = self.model.encode(texts, show_progress_bar=False, convert_to_tensor=True)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, self.model.tokenizer(texts).input_ids))
        return {"seconds": seconds, "tokens": tokens, "vectors": vectors[:shown].float().tolist()}


def start(settings: Settings) -> tuple[Embedder, dict[str, Any]]:
    """The model, on torch's CPU operators."""
    dtype = os.environ["BENCH_DTYPE"]
    packages = package_versions("sentence-transformers", "torch", "transformers")
    about = {"platform": "CPU", "precision": dtype, "packages": packages}
    return SentenceTransformersEmbedder(settings, dtype), about


if __name__ == "__main__":
    serve(start)
