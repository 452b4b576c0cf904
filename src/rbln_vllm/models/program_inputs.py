# SPDX-License-Identifier: Apache-2.0
"""The inputs of forward programs, for both model implementations."""

import torch
from torch import Tensor

from rbln_vllm.geometry import Geometry
from rbln_vllm.models.kv_layers import KVLayer, kv_input_name
from rbln_vllm.programs import ProgramKey

EMBEDS_INPUT = "inputs_embeds"
"""The input that takes the place of ``input_ids`` in programs that take embeddings."""
CAPTURE_BLOCKS = 2
"""Blocks of the pool a program is captured with; it runs with any number."""


def forward_inputs(
    key: ProgramKey, geometry: Geometry, kv_layers: tuple[KVLayer, ...], first_layer: int = 0
) -> dict[str, Tensor]:
    """Tensors of the shapes and dtypes that the program takes, by name.

    ``kv_layers`` are those of the pool's layers that it reads, from number ``first_layer`` on.
    """
    tokens = key.num_tokens
    inputs = {
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "block_table": torch.zeros(key.batch, geometry.num_blocks_per_seq, dtype=torch.int32),
        "slots": torch.zeros(tokens, dtype=torch.int64),
        "query_pos": torch.zeros(tokens, dtype=torch.int32),
    }
    for index, layer in enumerate(kv_layers, start=first_layer):
        shape = (CAPTURE_BLOCKS, *layer.block_shape(geometry.block_size))
        inputs[kv_input_name(index)] = torch.empty(shape, dtype=layer.torch_dtype)
    return inputs


def free_axes(kv_layers: tuple[KVLayer, ...], first_layer: int = 0) -> dict[str, int]:
    """The axis of each layer's part of the pool whose size is only known at run time."""
    last = first_layer + len(kv_layers)
    return {kv_input_name(index): 0 for index in range(first_layer, last)}
