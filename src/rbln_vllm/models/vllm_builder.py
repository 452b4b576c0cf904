# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` implementation: vLLM's own modules, built once and captured program by program."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model

from rbln_vllm.geometry import Geometry
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.models.attention import PagedInputs
from rbln_vllm.models.paged_module import PagedModule
from rbln_vllm.models.program_inputs import forward_inputs, free_axes
from rbln_vllm.models.sampler import capture_sampler, is_sampler
from rbln_vllm.models.vllm_linears import linears
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import Captured, ModuleCompiler, Toolchain


class VllmModelBuilder:
    """Builds the model (with its weights) and compiles its programs.

    Building costs the time and memory of loading the checkpoint, so it is done only when a
    program is missing. ``prefix`` goes before the names of its layers.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        geometry: Geometry,
        prefix: str = "",
        load_config: LoadConfig | None = None,
    ) -> None:
        self._config, self._geometry = vllm_config, geometry
        self._paged = PagedModule(
            vllm_config,
            lambda: get_model(vllm_config=vllm_config, prefix=prefix, load_config=load_config),
        )
        self.module: torch.nn.Module = self._paged.module
        self.kv_layers = self._paged.kv_layers
        # A drafter, whose layers have a prefix, has no adapters.
        shape = None if prefix else AdapterShape.of(vllm_config)
        self.adapters = None if shape is None else shape.adapters(linears(self.module))

    def compile(self, keys: Sequence[ProgramKey], toolchain: Toolchain) -> Iterator[Captured]:
        """Compile these programs, one by one; CaptureError says why a model cannot be."""
        compiler = toolchain.compiler(self.module)
        for key in keys:
            with self.capturing():
                captured = self._compile(key, compiler)
            yield captured

    def capturing(self) -> AbstractContextManager[None]:
        """Around whatever calls ``forward`` or ``logits``."""
        return self._paged.capturing()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        block_table: Tensor,
        slots: Tensor,
        query_pos: Tensor,
        **kv_caches: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Token ids ``[N]`` to hidden states ``[N, H]``, with all that a step needs as arguments.

        Followed by the states ``[N, layers * H]`` of those layers that a drafter reads, if the
        model was told of any.
        """
        paged = PagedInputs(block_table, slots, query_pos)
        with self._paged.attending(paged, kv_caches.values()):
            output = self.module(input_ids=input_ids, positions=positions)
        if isinstance(output, Tensor):
            return output
        hidden_NH, layers = output
        return hidden_NH, torch.cat(layers, dim=-1)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of any rows to their logits, and to the token each row likes best."""
        logits_BV: Tensor = cast(Any, self.module).compute_logits(hidden)
        return logits_BV, logits_BV.argmax(dim=-1)

    def _compile(self, key: ProgramKey, compiler: ModuleCompiler) -> Captured:
        if key.role is Role.LOGITS:
            return compiler.capture(self.logits, self._logits_inputs(key), key.name)
        if is_sampler(key):
            model = self._config.model_config
            return capture_sampler(key, compiler, model.get_vocab_size(), model.dtype)
        inputs = forward_inputs(key, self._geometry, self.kv_layers)
        axes = free_axes(self.kv_layers)
        return compiler.capture(self.forward, inputs, key.name, axes, self.adapters)

    def _logits_inputs(self, key: ProgramKey) -> dict[str, Tensor]:
        model = self._config.model_config
        return {"hidden": torch.zeros(key.batch, model.get_hidden_size(), dtype=model.dtype)}
