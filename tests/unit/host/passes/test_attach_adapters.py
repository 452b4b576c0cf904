# SPDX-License-Identifier: Apache-2.0
"""Linears of adapted modules take their adapters from inputs, fused as they are without."""

import math

import pytest
import torch
from torch import Tensor

from rbln_host.compiler.adapters import AdaptedModule, Adapters, a_input, b_input
from rbln_host.compiler.capture import Capturer
from rbln_host.compiler.graph import Captured
from rbln_host.compiler.lowering import lowered
from rbln_host.compiler.pack import packed_weights
from rbln_host.errors import CaptureError
from rbln_host.ops import NO_ADAPTER
from rbln_host.ops.lora import pack_b
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.options import Executor, ExecutorOptions
from tests.unit.host.passes.build import operators

TOKENS, HIDDEN, INNER, SLOTS, RANK = 5, 32, 48, 2, 3
SIZES = {"q": HIDDEN, "k": 16, "v": 16, "o": HIDDEN, "gate": INNER, "up": INNER, "down": HIDDEN}
EXECUTORS = (Executor.REFERENCE, Executor.NATIVE)


class Layer(torch.nn.Module):
    """The linears of a decoder layer, and what fuses with them."""

    q: torch.nn.Linear
    k: torch.nn.Linear
    v: torch.nn.Linear
    o: torch.nn.Linear
    gate: torch.nn.Linear
    up: torch.nn.Linear
    down: torch.nn.Linear

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, size in SIZES.items():
            width = INNER if name == "down" else HIDDEN
            self.add_module(name, torch.nn.Linear(width, size, bias=name in "qkv"))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        value = torch.cat([self.k(x), self.v(x)], dim=-1) * self.q(x)
        x = x + self.o(value)
        down: Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return x + down


def adapters_of(*left_out: str) -> Adapters:
    modules = tuple(
        AdaptedModule(
            name, f"{name}.weight", INNER if name == "down" else HIDDEN, size, name not in left_out
        )
        for name, size in SIZES.items()
    )
    return Adapters(SLOTS, RANK, torch.float32, modules)


def program(layer: torch.nn.Module, adapters: Adapters | None) -> Captured:
    x = torch.zeros(TOKENS, HIDDEN)
    (done,) = lowered([Capturer(layer).capture(layer, {"x": x}, "p", adapters=adapters)])
    return done


def random(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


def adapter_of(adapters: Adapters, slot: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        m.name: (
            random(f"a{m.name}{slot}", rank, m.in_features),
            random(f"b{m.name}{slot}", m.out_features, rank),
        )
        for m in adapters.adapted
    }


def inputs_of(adapters: Adapters, ranks: tuple[int, ...]) -> dict[str, Tensor]:
    made = {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in adapters.input_specs()}
    for slot, rank in enumerate(ranks):
        for name, (a, b) in adapter_of(adapters, slot, rank).items():
            made[a_input(name)][slot, :rank] = a
            made[b_input(name)][slot, :, :rank] = pack_b(b)
            made["lora_ranks"][adapters.places[name], slot] = rank
    return made


def merged(layer: Layer, adapters: Adapters, slot: int, rank: int) -> Layer:
    changed = Layer()
    for name, (a, b) in adapter_of(adapters, slot, rank).items():
        changed.get_parameter(f"{name}.weight").add_(b @ a)
    return changed


def run(captured: Captured, executor: Executor, inputs: dict[str, Tensor]) -> Tensor:
    executable = Executable(ExecutorOptions(executor))
    executable.add(captured)
    return executable.run("p", inputs)[0].clone()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("left_out", [(), ("k",), ("q", "up"), ("o", "down")])
def test_each_token_has_its_own_adapter(executor: Executor, left_out: tuple[str, ...]) -> None:
    """The tokens of a slot are as in a model with its adapter merged, the others bit for bit as in
    a program without adapters."""
    layer, adapters = Layer(), adapters_of(*left_out)
    x, ranks = random("x", TOKENS, HIDDEN), (RANK, 1)
    slots = torch.tensor([1, NO_ADAPTER, 0, NO_ADAPTER, 1], dtype=torch.int32)
    given = {"x": x, "lora_slots": slots, **inputs_of(adapters, ranks)}
    out = run(program(layer, adapters), executor, given)
    base = run(program(layer, None), executor, {"x": x})
    assert torch.equal(out[slots < 0], base[slots < 0])
    for slot, rank in enumerate(ranks):
        with torch.no_grad():
            expected = merged(layer, adapters, slot, rank)(x)
        torch.testing.assert_close(out[slots == slot], expected[slots == slot], rtol=0, atol=2e-5)
        assert not torch.allclose(out[slots == slot], base[slots == slot], atol=1e-2)


def test_what_is_fused_stays_fused() -> None:
    plain = operators(program(Layer(), None))
    adapted = operators(program(Layer(), adapters_of()))
    assert [name for name in adapted if name != "rbln::lora_shrink"] == [
        name.replace("rbln::linear", "rbln::lora_linear").replace(
            "rbln::gated_linear", "rbln::lora_gated_linear"
        )
        for name in plain
    ]
    # Query, key and value are one linear with one product for all their adapters; gate and up too.
    assert adapted.count("rbln::lora_shrink") == 4


def test_weights_are_those_without_adapters() -> None:
    plain, adapted = program(Layer(), None), program(Layer(), adapters_of())
    assert set(plain.weights) == set(adapted.weights)
    assert packed_weights(plain.graph) == packed_weights(adapted.graph)


def test_lowering_twice_changes_nothing() -> None:
    once = program(Layer(), adapters_of())
    (twice,) = lowered([once])
    assert twice.graph == once.graph


def test_a_linear_that_is_not_computed_is_named() -> None:
    other = AdaptedModule("head", "head.weight", HIDDEN, 7)
    adapters = Adapters(1, 4, torch.float32, (*adapters_of().modules, other))
    with pytest.raises(CaptureError, match=r"\['head'\].*--lora-target-modules"):
        program(Layer(), adapters)


@pytest.mark.parametrize(
    ("slots", "rank", "modules", "message"),
    [
        (0, 1, adapters_of().modules, "a slot and a rank"),
        (1, 0, adapters_of().modules, "a slot and a rank"),
        (1, 1, adapters_of().modules[:1] * 2, "one name"),
        (1, 1, adapters_of(*SIZES.keys() - {"q"}).modules[1:], "no linear"),
    ],
)
def test_adapters_that_cannot_be(
    slots: int, rank: int, modules: tuple[AdaptedModule, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Adapters(slots, rank, torch.float32, modules)
