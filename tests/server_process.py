# SPDX-License-Identifier: Apache-2.0
"""A real `rbln-vllm serve` for the time of a test.

with ServerProcess([model_dir, "--max-model-len", "256"], log_file=tmp_path / "log") as server:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
"""

from __future__ import annotations

from scripts.server_process import ServerError, ServerProcess, end_group, fetch, free_port

__all__ = ["ServerError", "ServerProcess", "end_group", "fetch", "free_port"]
