# SPDX-License-Identifier: Apache-2.0
"""Driver of this project: vLLM with the plugin."""

from typing import Any

from benchmarks.engines import vllm_engine
from benchmarks.engines.protocol import Engine, Settings, serve


def start(settings: Settings) -> tuple[Engine, dict[str, Any]]:
    """vLLM on our platform, or RuntimeError."""
    return vllm_engine.start(settings, "RblnPlatform")


if __name__ == "__main__":
    serve(start)
