# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` implementation: vLLM's own modules, built once and captured program by program."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model

import rbln_vllm.models.layers  # noqa: F401  (registers our layers with vLLM)
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.models.kv_layers import KVLayer
from rbln_vllm.models.program_inputs import forward_inputs, free_axes
from rbln_vllm.models.sampler import capture_sampler, is_sampler
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Captured, ModuleCompiler, Toolchain


class VllmModelBuilder:
    """Builds the model (with its weights) and compiles its programs.

    Building costs the time and memory of loading the checkpoint, so it is done only when a
    program is missing.
    """

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry) -> None:
        self._config, self._geometry = vllm_config, geometry
        # Layers add themselves to the context by name; a second build must start from none.
        self._context = vllm_config.compilation_config.static_forward_context
        self._context.clear()
        with set_current_vllm_config(vllm_config):
            self._model = get_model(vllm_config=vllm_config)
        self._layers = self._attention_layers()
        self.kv_layers = tuple(self._kv_layer(name) for name in self._layers)
        self._context.clear()

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        compiler = toolchain.compiler(self._model)
        for key in keys:
            with set_current_vllm_config(self._config), self._layers_in_context():
                captured = self._compile(key, compiler)
            yield captured

    def _compile(self, key: ProgramKey, compiler: ModuleCompiler) -> Captured:
        if key.role is Role.LOGITS:
            return compiler.capture(self._logits, self._logits_inputs(key), key.name)
        if is_sampler(key):
            model = self._config.model_config
            return capture_sampler(key, compiler, model.get_vocab_size(), model.dtype)
        inputs = forward_inputs(key, self._geometry, self.kv_layers)
        return compiler.capture(self._forward, inputs, key.name, free_axes(self.kv_layers))

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        query_pos: Tensor,
        **kv_caches: Tensor,
    ) -> Tensor:
        """Token ids to hidden states, with everything a step needs as arguments."""
        paged = PagedInputs(block_table, slots, query_pos)
        for layer, kv_cache in zip(self._layers.values(), kv_caches.values(), strict=True):
            layer.kv_cache = kv_cache
        metadata: dict[str, Any] = dict.fromkeys(self._layers, paged)
        with set_forward_context(metadata, self._config):
            hidden_NH: Tensor = self._model(input_ids=input_ids, positions=positions)
        return hidden_NH

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of any rows to their logits, and to the token each row likes best."""
        logits_BV: Tensor = cast(Any, self._model).compute_logits(hidden)
        return logits_BV, logits_BV.argmax(dim=-1)

    @contextmanager
    def _layers_in_context(self) -> Iterator[None]:
        """Let vLLM find the real layers while a program is captured; then what was there."""
        kept = dict(self._context)
        self._context.clear()
        self._context.update(self._layers)
        try:
            yield
        finally:
            self._context.clear()
            self._context.update(kept)

    def _attention_layers(self) -> dict[str, Attention]:
        others = [n for n, layer in self._context.items() if not isinstance(layer, Attention)]
        if others:
            raise NotImplementedError(
                f"layers {others[:3]} keep a state other than paged attention's, which is not "
                "built yet"
            )
        return dict(self._context)

    def _kv_layer(self, name: str) -> KVLayer:
        layer = self._layers[name]
        spec = layer.get_kv_cache_spec(self._config)
        assert spec is not None
        return KVLayer.from_spec(name, layer.num_heads, spec)

    def _logits_inputs(self, key: ProgramKey) -> dict[str, Tensor]:
        model = self._config.model_config
        return {"hidden": torch.zeros(key.batch, model.get_hidden_size(), dtype=model.dtype)}
