# SPDX-License-Identifier: Apache-2.0
"""Pooling models in the worker: staging, the model as vLLM's pooler sees it, the runner."""

from rbln_vllm.worker.pooling.runner import EncoderRunner, PoolingRunner

__all__ = ["EncoderRunner", "PoolingRunner"]
