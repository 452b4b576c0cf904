# SPDX-License-Identifier: Apache-2.0
"""Driver of vLLM's own CPU backend: the same installation with VLLM_PLUGINS set to nothing."""

from typing import Any

from benchmarks.engines import vllm_engine
from benchmarks.engines.protocol import Engine, Settings, serve


def start(settings: Settings) -> tuple[Engine, dict[str, Any]]:
    """vLLM on its CPU platform, or RuntimeError."""
    return vllm_engine.start(settings, "CpuPlatform")


if __name__ == "__main__":
    serve(start)
