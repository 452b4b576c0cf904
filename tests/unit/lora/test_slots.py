# SPDX-License-Identifier: Apache-2.0
"""Which linears have adapters, and what is where in the programs' inputs."""

import math
from dataclasses import replace

import pytest
import torch

from rbln_vllm.lora.shape import AdapterShape, modules_from_json, modules_to_json
from rbln_vllm.lora.slots import AdapterSlots, LowRank, slot_bytes
from rbln_vllm.toolchain import AdaptedModule, a_input, b_input

MODULES = (
    AdaptedModule("layers.0.q_proj", "layers.0.qkv_proj.weight", 8, 20),
    AdaptedModule("layers.0.k_proj", "layers.0.qkv_proj.weight", 8, 16),
    AdaptedModule("layers.0.o_proj", "layers.0.o_proj.weight", 20, 8),
)
SHAPE = AdapterShape(3, 4, torch.float32)


def names_of(*targets: str) -> list[str]:
    adapters = replace(SHAPE, targets=targets).adapters(MODULES)
    return [module.name.rsplit(".", 1)[-1] for module in adapters.adapted]


def test_targets_are_modules_or_the_layers_that_compute_them() -> None:
    assert names_of("q_proj") == ["q_proj"]
    assert names_of("qkv_proj") == ["q_proj", "k_proj"]
    assert names_of("o_proj", "0.k_proj") == ["k_proj", "o_proj"]
    assert names_of("layers.0.o_proj") == ["o_proj"]
    with pytest.raises(ValueError, match=r"proj names no linear of this model; it has k_proj, o"):
        names_of("proj")


def test_each_shape_has_a_key_of_its_own() -> None:
    shapes = (
        SHAPE,
        replace(SHAPE, slots=2),
        replace(SHAPE, rank=8),
        replace(SHAPE, dtype=torch.bfloat16),
        replace(SHAPE, targets=("q_proj",)),
    )
    assert len({shape.key for shape in shapes}) == len(shapes)


def test_a_manifest_keeps_the_linears() -> None:
    adapters = SHAPE.adapters(MODULES)
    assert modules_from_json(modules_to_json(adapters)) == MODULES
    assert modules_to_json(None) == []
    with pytest.raises(TypeError):
        modules_from_json([{"name": "x"}])


def part(rank: int, module: AdaptedModule, scale: float = 1.0) -> LowRank:
    a, b = torch.randn(rank, module.in_features), torch.randn(module.out_features, rank)
    return LowRank(a, b, scale)


def test_filled_and_cleared() -> None:
    slots = AdapterSlots(SHAPE.adapters(MODULES))
    q, o = part(2, MODULES[0], scale=0.5), part(4, MODULES[2])
    slots.fill(1, {MODULES[0].name: q, MODULES[2].name: o})
    assert slots.inputs["lora_ranks"].tolist() == [[0, 2, 0], [0, 0, 0], [0, 4, 0]]
    assert torch.equal(slots.inputs[a_input(MODULES[0].name)][1, :2], q.a_RK)
    b = slots.inputs[b_input(MODULES[0].name)][1]
    assert b.shape == (2, 4, 16)
    unpacked = b.transpose(1, 2).reshape(-1, 4)[:20, :2]
    assert torch.equal(unpacked, 0.5 * q.b_OR)
    slots.fill(1, {MODULES[1].name: part(1, MODULES[1])})
    assert slots.inputs["lora_ranks"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    slots.clear(1)
    assert not slots.inputs["lora_ranks"].any()


def test_inputs_stay_where_they_are() -> None:
    """Programs are bound to their memory."""
    slots = AdapterSlots(SHAPE.adapters(MODULES))
    before = {name: tensor.data_ptr() for name, tensor in slots.inputs.items()}
    slots.fill(0, {module.name: part(4, module) for module in MODULES})
    slots.clear(0)
    assert {name: tensor.data_ptr() for name, tensor in slots.inputs.items()} == before


def test_bytes_of_all_slots() -> None:
    adapters = SHAPE.adapters(MODULES)
    numbers = 3 * 4 * ((8 + 32) + (8 + 16) + (20 + 16))
    assert slot_bytes(adapters) == 4 * (numbers + math.prod((3, 3)))
    assert slot_bytes(adapters) == sum(t.nbytes for t in AdapterSlots(adapters).inputs.values())


@pytest.mark.parametrize(("a", "b"), [((2, 8), (20, 3)), ((0, 8), (20, 0)), ((8,), (20, 8))])
def test_matrices_without_a_common_rank(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no common rank"):
        LowRank(torch.zeros(a), torch.zeros(b))
