# SPDX-License-Identifier: Apache-2.0
"""All passes together: layers as models write them, and random programs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from rbln_host.compiler.capture import capture
from rbln_host.compiler.graph import Captured
from rbln_host.compiler.passes import lower
from rbln_host.errors import ArtifactError
from rbln_host.runtime.interpreter import Interpreter
from tests.unit.host.passes.build import Build, operators, random, text

HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 32, 4, 2, 8, 48
TOKENS, POSITIONS = 3, 16
ops = torch.ops.rbln


def attend(query: Tensor, key: Tensor, value: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """What vLLM's attention layer does around our operators: a buffer, filled by a copy."""
    output = torch.empty(TOKENS, HEADS * SIZE, dtype=query.dtype)
    cache = inputs["kv"]
    ops.write_kv(
        key.view(-1, KV_HEADS, SIZE), value.view(-1, KV_HEADS, SIZE), cache, inputs["slots"]
    )
    attended = ops.paged_attention(
        query.view(-1, HEADS, SIZE),
        cache,
        inputs["block_table"],
        inputs["query_pos"],
        SIZE**-0.5,
        0,
        0.0,
        None,
        None,
    )
    output.view(-1, HEADS, SIZE).copy_(attended)
    return output.view(-1, HEADS * SIZE)


class VllmLayer(nn.Module):
    """A decoder layer as vLLM's Llama is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(
            torch.cat((random(POSITIONS, 4).cos(), random(POSITIONS, 4).sin()), -1)
        )
        self.embed = nn.Parameter(random(20, HIDDEN))
        self.norm1 = nn.Parameter(random(HIDDEN))
        self.norm2 = nn.Parameter(random(HIDDEN) + 1)
        self.norm3 = nn.Parameter(random(HIDDEN) - 1)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def rotate(self, hidden: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.table.index_select(0, positions.flatten()).chunk(2, dim=-1)
        shape, hidden = hidden.shape, hidden.view(TOKENS, -1, SIZE)
        part, rest = hidden[..., :SIZE], hidden[..., SIZE:]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        one, two = torch.chunk(part, 2, dim=-1)
        turned = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1).reshape(shape)

    def forward(self, **inputs: Tensor) -> Tensor:
        residual = functional.embedding(inputs["ids"].long(), self.embed)
        hidden: Tensor = ops.rms_norm(residual, self.norm1, 1e-6, 0)
        sizes = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        query, key, value = self.qkv(hidden).split(sizes, dim=-1)
        positions = inputs["positions"]
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        hidden = self.out(attend(query, key, value, inputs))
        hidden, residual = ops.fused_add_rms_norm(hidden, residual, self.norm2, 1e-6, 0)
        both = self.gate_up(hidden)
        hidden = self.down(functional.silu(both[:, :INNER]) * both[:, INNER:])
        hidden, _ = ops.fused_add_rms_norm(hidden, residual, self.norm3, 1e-6, 0)
        return hidden


class HuggingFaceLayer(nn.Module):
    """A decoder layer as Hugging Face's Llama is captured, over a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.rand(SIZE // 2))
        self.embed = nn.Parameter(random(20, HIDDEN))
        self.norm1 = nn.Parameter(random(HIDDEN))
        self.norm2 = nn.Parameter(random(HIDDEN) + 1)
        self.q = nn.Linear(HIDDEN, HEADS * SIZE)
        self.k = nn.Linear(HIDDEN, KV_HEADS * SIZE)
        self.v = nn.Linear(HIDDEN, KV_HEADS * SIZE)
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + 1e-6)).to(hidden.dtype)

    def rotate(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = hidden.shape[-1] // 2
        turned = torch.cat((-hidden[..., half:], hidden[..., :half]), dim=-1)
        return hidden * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden: Tensor = functional.embedding(inputs["ids"].long().unsqueeze(0), self.embed)
        angles = inputs["positions"][None, :, None].float() * self.frequencies.float()
        twice = torch.cat((angles, angles), dim=-1)
        cos, sin = twice.cos().to(hidden.dtype), twice.sin().to(hidden.dtype)
        normed = self.norm(hidden, self.norm1)
        query, key, value = (
            linear(normed).view(1, TOKENS, -1, SIZE).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        query, key, value = (t.transpose(1, 2).reshape(TOKENS, -1) for t in (query, key, value))
        attended = attend(query, key, value, inputs).reshape(1, TOKENS, -1)
        hidden = hidden + self.o(attended)
        normed = self.norm(hidden, self.norm2)
        hidden = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return hidden[0]


def step(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "ids": torch.tensor([3, 17, 0], dtype=torch.int32),
        "positions": torch.tensor([4, 0, 9]),
        "block_table": torch.tensor([[1, 2], [0, 3], [2, 1]], dtype=torch.int32),
        "query_pos": torch.tensor([4, -1, 9], dtype=torch.int32),
        "slots": torch.tensor([12, -1, 9]),
        "kv": random(4, KV_HEADS, 8, 2 * SIZE, dtype=dtype),
    }


def captured(layer: type[nn.Module], dtype: torch.dtype) -> Captured:
    torch.manual_seed(0)
    module = layer().to(dtype).eval()
    return capture(module, step(dtype), "layer", {"kv": 0})


def run(program: Captured, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = step(dtype)
    (output,) = Interpreter(program.graph, program.weights).run(inputs)
    return output, inputs["kv"]


ROUND_ONCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def assert_same(before: Captured, after: Captured, dtype: torch.dtype) -> None:
    for expected, got in zip(run(before, dtype), run(after, dtype), strict=True):
        limit = ROUND_ONCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
def test_vllms_layer(dtype: torch.dtype) -> None:
    before = captured(VllmLayer, dtype)
    after = lower(before)
    assert operators(after) == [
        "embedding",
        "rbln::rms_norm",
        "rbln::linear",
        "rbln::rotary_write_kv",
        "rbln::paged_attention",
        "rbln::linear",
        "rbln::fused_add_rms_norm",
        "rbln::gated_linear",
        "rbln::linear",
        "rbln::fused_add_rms_norm",
    ]
    assert_same(before, after, dtype)


@pytest.mark.parametrize("dtype", list(ROUND_ONCE))
def test_hugging_faces_layer(dtype: torch.dtype) -> None:
    before = captured(HuggingFaceLayer, dtype)
    after = lower(before)
    names = [name for name in operators(after) if name.startswith("rbln::")]
    assert names == [
        *["rbln::elementwise"] * 3,
        "rbln::rms_norm",
        "rbln::linear",
        "rbln::rotary_write_kv",
        "rbln::paged_attention",
        "rbln::linear",
        "rbln::fused_add_rms_norm",
        "rbln::gated_linear",
        "rbln::linear",
    ]
    assert {"q.weight|k.weight|v.weight", "gate.weight|up.weight"} <= set(after.weights)
    assert_same(before, after, dtype)


@pytest.mark.parametrize("layer", [VllmLayer, HuggingFaceLayer])
def test_lowering_twice_changes_nothing(layer: type[nn.Module]) -> None:
    once = lower(captured(layer, torch.float32))
    assert text(lower(once)) == text(once)


def test_the_program_is_the_same_every_time() -> None:
    before = captured(HuggingFaceLayer, torch.float32)
    assert lower(before).graph == lower(before).graph


def test_programs_of_one_model_share_the_weights_made_for_them() -> None:
    made: dict[Any, Tensor] = {}
    before = captured(HuggingFaceLayer, torch.float32)
    one, other = lower(before, made), lower(before, made)
    assert all(one.weights[name] is other.weights[name] for name in one.weights)


def test_a_program_that_cannot_run_is_refused() -> None:
    b = Build(x=(2, 3), y=(2, 3))
    b("out = mm", "x", "y")
    with pytest.raises(ArtifactError, match="aten::mm"):
        lower(b.captured("out"))


Step = Callable[[Build, str, str, str], None]


def gated(b: Build, one: str, _: str, out: str) -> None:
    b(f"{out}both = linear", one, "w2")
    b(f"{out}g, {out}u = chunk", f"{out}both", 2, -1)
    b(f"{out}a = silu", f"{out}g")
    b(f"{out}m = mul.Tensor", f"{out}a", f"{out}u")
    b(f"{out} = tanh", f"{out}m")


def normed(b: Build, one: str, _: str, out: str) -> None:
    b(f"{out}s = pow.Tensor_Scalar", one, 2)
    b(f"{out}v = mean.dim", f"{out}s", [-1], True)
    b(f"{out}e = add.Tensor", f"{out}v", 1e-3)
    b(f"{out}r = rsqrt", f"{out}e")
    b(f"{out} = mul.Tensor", one, f"{out}r")


def buffered(b: Build, one: str, _: str, out: str) -> None:
    b(f"{out}b = empty.memory_format", [16, 16])
    b(f"{out}c = copy_", f"{out}b", one)
    b(f"{out} = view", f"{out}c", [16, 16])


def in_place(b: Build, one: str, other: str, out: str) -> None:
    b(f"{out}c = clone", one)
    b(f"{out}w = mul_.Tensor", f"{out}c", 0.5)
    b(f"{out} = add.Tensor", f"{out}c", other)


def of_a_part_in_place(b: Build, one: str, other: str, out: str) -> None:
    b(f"{out}p = slice.Tensor", one, 0, 1, 3)
    b(f"{out}w = mul_.Tensor", f"{out}p", 0.5)
    b(f"{out} = add.Tensor", one, other)


STEPS: list[Step] = [
    lambda b, one, _, out: b(f"{out} = linear", one, "w"),
    lambda b, one, _, out: b(f"{out} = linear", one, "w", "bias"),
    lambda b, one, other, out: b(f"{out} = add.Tensor", one, other),
    lambda b, one, other, out: b(f"{out} = mul.Tensor", one, other),
    lambda b, one, _, out: b(f"{out} = add.Tensor", one, "bias"),
    lambda b, one, _, out: b(f"{out} = silu", one),
    lambda b, one, _, out: b(f"{out} = relu", one),
    lambda b, one, _, out: b(f"{out} = t", one),
    lambda b, one, _, out: b(f"{out} = clone", one),
    lambda b, one, _, out: b(f"{out} = dropout", one, 0.0, False),
    lambda b, one, _, out: b(f"{out} = rbln::rms_norm", one, "bias", 1e-3, 0),
    lambda b, one, _, out: b(f"{out} = layer_norm", one, [16], "bias", "bias", 1e-3, False),
    *(gated, normed, buffered, in_place, of_a_part_in_place),
]


@settings(max_examples=150)
@given(st.data())
def test_random_programs_compute_the_same(data: st.DataObject) -> None:
    b = Build(x=(16, 16), y=(16, 16))
    b.weight("w", 16, 16)
    b.weight("w2", 32, 16)
    b.weight("bias", 16)
    values = ["x", "y"]
    for index in range(data.draw(st.integers(1, 10))):
        make = data.draw(st.sampled_from(STEPS))
        make(b, data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values)), f"v{index}")
        # Sums and products of many values would leave no digits to compare.
        b(f"v{index}n = rbln::layer_norm", f"v{index}", None, None, 1e-2)
        values += [f"v{index}", f"v{index}n"] if data.draw(st.booleans()) else [f"v{index}n"]
    before = b.captured(*data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    after = lower(before)
    b.assert_same(before, after, 1e-4)
    assert text(lower(after)) == text(after)
