# SPDX-License-Identifier: Apache-2.0
"""Driver of the embeddings of vLLM's own CPU backend: VLLM_PLUGINS is set to nothing."""

from typing import Any

from benchmarks.engines import embed_vllm
from benchmarks.engines.protocol import Embedder, Settings, serve


def start(settings: Settings) -> tuple[Embedder, dict[str, Any]]:
    """vLLM on its CPU platform, or RuntimeError."""
    return embed_vllm.start(settings, "CpuPlatform")


if __name__ == "__main__":
    serve(start)
