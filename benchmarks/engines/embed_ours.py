# SPDX-License-Identifier: Apache-2.0
"""Driver of this project's embeddings: vLLM with the plugin."""

from typing import Any

from benchmarks.engines import embed_vllm
from benchmarks.engines.protocol import Embedder, Settings, serve


def start(settings: Settings) -> tuple[Embedder, dict[str, Any]]:
    """vLLM on our platform, or RuntimeError."""
    return embed_vllm.start(settings, "RblnPlatform")


if __name__ == "__main__":
    serve(start)
