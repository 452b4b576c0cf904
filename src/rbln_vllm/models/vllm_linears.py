# SPDX-License-Identifier: Apache-2.0
"""The linears of one of vLLM's models that may have adapters."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.model_executor.layers.linear import LinearBase

from rbln_vllm.toolchain import AdaptedModule


def linears(model: torch.nn.Module) -> tuple[AdaptedModule, ...]:
    """All of them, by the names of Hugging Face's modules, which adapters use.

    vLLM computes several of those as one layer (``qkv_proj``); each is a module of its own here.
    """
    packed = getattr(model, "packed_modules_mapping", None) or {}
    return tuple(
        module
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase)
        for module in _modules(name, layer, packed)
    )


def _modules(
    name: str, layer: LinearBase, packed: Mapping[str, Sequence[str]]
) -> Iterator[AdaptedModule]:
    parent, _, last = name.rpartition(".")
    sizes = [int(size) for size in getattr(layer, "output_sizes", [layer.output_size])]
    names = packed.get(last, (last,))
    if len(names) == 1:
        sizes = [sum(sizes)]
    elif len(names) != len(sizes):
        raise NotImplementedError(
            f"{name} is {len(sizes)} linears in one and its model names {len(names)}: it cannot "
            "have adapters; leave out --enable-lora"
        )
    for part, size in zip(names, sizes, strict=True):
        full = f"{parent}.{part}" if parent else part
        yield AdaptedModule(full, f"{name}.weight", int(layer.input_size), size)
