# SPDX-License-Identifier: Apache-2.0
"""What an NPU would say to a model, found without the card and without compiling."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from rbln_vllm.cli.text_table import byte_size, text_table
from rbln_vllm.core.limits import RESERVED_BLOCKS, blocks_for
from rbln_vllm.devices import aligned_weight_bytes, npu_kv_budget
from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer, block_bytes
from rbln_vllm.models.transformers.layers import attention_layers
from rbln_vllm.models.transformers.linears import linears
from rbln_vllm.optimum.compiling import CompileJob
from rbln_vllm.optimum.recorded import RecordedConfig

_TITLES = ("PROGRAM", "ROLE", "BATCH", "QUERY", "TOKENS")
_LAYER = re.compile(r".*?\.\d+\.")
"""The part of a parameter's name that says which layer it is of."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device; ``blocks`` of KV that fit, None on HOST, which measures its memory."""

    weights: int
    kv_block: int
    blocks_wanted: int
    blocks: int | None = None


@dataclass(frozen=True)
class TargetReport:
    """Sizes, programs, memory, and in words what the device refuses or was not promised."""

    recorded: RecordedConfig
    geometry: Geometry
    memory: MemoryEstimate
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, job: CompileJob) -> "TargetReport":
        """Builds the model without weights. ValueError where sizes alone are refused, or an
        adapter does not fit."""
        geometry, refusals = job.plan.geometry, []
        model = job.source.shape()
        layers = () if job.plan.architecture.encoder else attention_layers(model)
        if job.adapter_shape is not None:
            job.adapter_parts(job.adapter_shape.adapters(linears(model)))
        memory = _estimate(geometry, layers, _weight_bytes(model))
        if geometry.profile.memory_bytes is not None:
            try:
                memory = _with_budget(memory, geometry, layers)
            except (MemoryError, ValueError) as error:
                refusals.append(str(error))
        refusals += [*_window_refusals(geometry, layers), *_pool_refusals(memory, geometry)]
        return cls(job.recorded, geometry, memory, tuple(refusals), tuple(_notes(job)))

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rbln_config": self.recorded.to_json(),
            "programs": list(self.geometry.table.names),
            "memory": vars(self.memory),
            "refusals": list(self.refusals),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """As text for people."""
        lora = self.recorded.lora_config
        sizes = {
            **self.recorded.to_json(),
            "lora_config": lora.summary if lora else "none",
            "weights": byte_size(self.memory.weights),
            "kv_block": byte_size(self.memory.kv_block),
            "kv_blocks_wanted": self.memory.blocks_wanted,
            "kv_blocks_that_fit": "measured" if self.memory.blocks is None else self.memory.blocks,
        }
        width = max(map(len, sizes)) + 2
        rows = [
            (key.name, str(key.role), str(key.batch), str(key.query), str(key.num_tokens))
            for key in self.geometry.table.programs
        ]
        lines = [f"{name:{width}}{_plain(value)}" for name, value in sizes.items()]
        lines += ["", text_table(_TITLES, rows), ""]
        lines += [f"NOTE: {note}" for note in self.notes]
        lines += [f"REFUSED: {refusal}" for refusal in self.refusals] or ["Nothing is refused."]
        return "\n".join(lines)


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _weight_bytes(model: torch.nn.Module) -> int:
    """As an NPU stores them: a layer's parameters together, aligned."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        layer = _LAYER.match(name)
        parts[layer.group() if layer else name] += parameter.nbytes
    return aligned_weight_bytes(parts.values())


def _estimate(geometry: Geometry, layers: tuple[KVLayer, ...], weights: int) -> MemoryEstimate:
    tokens = geometry.num_blocks_per_seq * geometry.block_size * geometry.max_num_seqs
    wanted = blocks_for(tokens, geometry.block_size) if layers else 0
    return MemoryEstimate(weights, block_bytes(layers, geometry.block_size), wanted)


def _with_budget(
    memory: MemoryEstimate, geometry: Geometry, layers: tuple[KVLayer, ...]
) -> MemoryEstimate:
    """MemoryError when weights and programs alone do not fit."""
    profile = geometry.profile
    budget = npu_kv_budget(
        profile,
        profile.default_gpu_memory_utilization,
        memory.weights,
        len(geometry.table.programs),
        num_devices=1,
        num_kv_heads=min((layer.num_kv_heads for layer in layers), default=1),
    )
    if not layers:
        return memory
    blocks = profile.cap_num_blocks(budget // memory.kv_block)
    return MemoryEstimate(memory.weights, memory.kv_block, memory.blocks_wanted, blocks)


def _pool_refusals(memory: MemoryEstimate, geometry: Geometry) -> list[str]:
    needed = geometry.num_blocks_per_seq + RESERVED_BLOCKS
    if memory.blocks is None or memory.blocks >= needed:
        return []
    return [
        f"a sequence of {geometry.max_model_len} tokens needs {needed} KV blocks, of which "
        f"{memory.blocks} fit: lower max_seq_len"
    ]


def _window_refusals(geometry: Geometry, layers: tuple[KVLayer, ...]) -> list[str]:
    widest = max((layer.window for layer in layers), default=0)
    if not widest:
        return []
    try:
        geometry.profile.check_window(widest, geometry.chunk)
    except ValueError as error:
        return [str(error)]
    return []


def _notes(job: CompileJob) -> list[str]:
    row, profile = job.plan.architecture, job.plan.geometry.profile
    notes = []
    if profile.family not in row.devices:
        families = ", ".join(sorted(map(str, row.devices)))
        notes.append(f"{row.name} is promised for {families}, not for {profile.family}")
    return notes + ([row.notes] if row.notes else [])
