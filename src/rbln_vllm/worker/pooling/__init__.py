# SPDX-License-Identifier: Apache-2.0
"""Pooling models in the worker: staging, running programs, the model as vLLM's pooler sees it."""
