# SPDX-License-Identifier: Apache-2.0
"""The logits of the transformers implementation's programs, run one step at a time, no engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from rbln_vllm.devices import resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import kv_input_name
from rbln_vllm.models.transformers.builder import TransformersModelBuilder
from rbln_vllm.models.transformers.source import ModelSource
from rbln_vllm.programs import ProgramKey, Role
from rbln_vllm.toolchain import host_toolchain
from rbln_vllm.worker.inputs import StagedInputs, StepInputs, slots_of
from tests.engine.engines import BLOCK, CHUNK, MAX_LEN

PREFILL = ProgramKey(Role.PREFILL, 1, CHUNK)
DECODE = ProgramKey(Role.DECODE, 2)
"""Two rows, of which the second is padding."""
LOGITS = ProgramKey(Role.LOGITS, CHUNK)


class Stepper:
    """A model's programs over a pool of its own, which was full of NaN before."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        geometry = Geometry(resolve_profile(None), CHUNK, BLOCK, MAX_LEN, 1, (DECODE.batch,))
        source = ModelSource(AutoConfig.from_pretrained(directory), str(directory), dtype)
        builder = TransformersModelBuilder(source, geometry)
        toolchain = host_toolchain()
        self._executable = toolchain.new_executable()
        self._executable.add(*builder.compile((PREFILL, DECODE, LOGITS), toolchain))
        self._width = geometry.num_blocks_per_seq
        shapes = [layer.block_shape(BLOCK) for layer in builder.kv_layers]
        self._executable.bind_kv(
            {
                kv_input_name(i): torch.full((self._width + 1, *shape), torch.nan, dtype=dtype)
                for i, shape in enumerate(shapes)
            }
        )

    def logits(self, tokens: list[int], decoded: int) -> Tensor:
        """`[n, vocabulary]` of the `n` tokens, the last `decoded` of them one step at a time."""
        prefilled = len(tokens) - decoded
        starts = list(range(0, prefilled, CHUNK))
        parts = [self._step(PREFILL, tokens[: min(s + CHUNK, prefilled)], s) for s in starts]
        parts += [self._step(DECODE, tokens[: i + 1], i) for i in range(prefilled, len(tokens))]
        return torch.cat(parts)

    def _step(self, key: ProgramKey, tokens: list[int], start: int) -> Tensor:
        """Logits of the tokens from `start` on, given those before."""
        positions_N = np.arange(start, len(tokens))
        blocks_1T = np.arange(1, self._width + 1)[None]
        slots_N = slots_of(blocks_1T, np.zeros_like(positions_N), positions_N, BLOCK)
        ids_N, counts_1 = np.array(tokens[start:]), np.array([len(tokens) - start])
        step = StepInputs(ids_N, positions_N, slots_N, counts_1, blocks_1T)
        staged = StagedInputs(key, self._width).stage(step)
        (hidden_NH,) = self._executable.run(key.name, staged, step.num_tokens)
        rows = torch.zeros(LOGITS.batch, hidden_NH.shape[1], dtype=hidden_NH.dtype)
        rows[: step.num_tokens] = hidden_NH[: step.num_tokens]
        logits_NV = self._executable.run(LOGITS.name, {"hidden": rows})[0]
        return logits_NV[: step.num_tokens].float().clone()
