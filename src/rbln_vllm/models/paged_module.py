# SPDX-License-Identifier: Apache-2.0
"""A module of vLLM's whose attention layers compute over a pool that they are given."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

import rbln_vllm.models.layers
import rbln_vllm.models.moe_layers  # noqa: F401  (both register our layers with vLLM)
from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.models.kv_layers import KVLayer


class PagedModule:
    """What ``build`` makes, and its attention layers, which vLLM finds by their names.

    Raises NotImplementedError for a layer with another state than paged attention's.
    """

    def __init__(self, vllm_config: VllmConfig, build: Callable[[], torch.nn.Module]) -> None:
        self._config = vllm_config
        # Layers add themselves to the context by name; a second build must start from none.
        self._context = vllm_config.compilation_config.static_forward_context
        with self._layers_replaced({}), set_current_vllm_config(vllm_config):
            self.module = build()
            self._layers = self._attention_layers()
        self.kv_layers = tuple(self._kv_layer(name) for name in self._layers)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Let vLLM find the real layers while a program is captured; then what was there."""
        with self._layers_replaced(self._layers), set_current_vllm_config(self._config):
            yield

    @contextmanager
    def attending(self, paged: PagedInputs, kv_caches: Iterable[Tensor]) -> Iterator[None]:
        """Let the layers compute over these: a part of the pool for each, in their order."""
        for layer, kv_cache in zip(self._layers.values(), kv_caches, strict=True):
            layer.kv_cache = kv_cache
        metadata: dict[str, Any] = dict.fromkeys(self._layers, paged)
        with set_forward_context(metadata, self._config):
            yield

    @contextmanager
    def _layers_replaced(self, layers: Mapping[str, Any]) -> Iterator[None]:
        kept = dict(self._context)
        self._context.clear()
        self._context.update(layers)
        try:
            yield
        finally:
            self._context.clear()
            self._context.update(kept)

    def _attention_layers(self) -> dict[str, Attention]:
        found = {n: m for n, m in self._context.items() if not isinstance(m, MoERunner)}
        others = [n for n, layer in found.items() if not isinstance(layer, Attention)]
        if others:
            raise NotImplementedError(
                f"layers {others[:3]} keep a state other than paged attention's, which is not "
                "built yet"
            )
        return found

    def _kv_layer(self, name: str) -> KVLayer:
        layer = self._layers[name]
        spec = layer.get_kv_cache_spec(self._config)
        assert spec is not None
        return KVLayer.from_spec(name, layer.num_heads, spec)
