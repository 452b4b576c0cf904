# SPDX-License-Identifier: Apache-2.0
"""Results depend neither on the number of threads nor on the run, bit for bit."""

from collections.abc import Callable

import pytest
import torch

from rbln_host import _native
from rbln_host.compiler.pack import pack
from tests.unit.host.native.attention_calls import Heads, Rules, build
from tests.unit.host.native.programs import (
    CPUS,
    Loaded,
    Op,
    assert_same_bits,
    blank,
    random,
    run,
)
from tests.unit.host.native.strategies import each_dtype, each_level

THREADS = (1, 2, 3, 5)


def cpus(count: int) -> list[int]:
    """CPUs for that many threads, over again where there are not so many."""
    return [CPUS[i % len(CPUS)] for i in range(count)]


def linear(dtype: torch.dtype) -> Op:
    weight = pack(random(1, 600, 90, dtype=dtype))
    x, residual = random(2, 29, 90, dtype=dtype), random(3, 29, 600, dtype=dtype)
    return Op("linear", [x, weight, None, residual, blank((29, 600), dtype)], text="gelu")


def gated_linear(dtype: torch.dtype) -> Op:
    weight = pack(random(1, 640, 90, dtype=dtype))
    tensors = [random(2, 5, 90, dtype=dtype), weight, None, blank((5, 320), dtype)]
    return Op("gated_linear", tensors, text="silu")


def add_rms_norm(dtype: torch.dtype) -> Op:
    x, residual, weight = (
        random(i, *s, dtype=dtype) for i, s in enumerate(((90, 577),) * 2 + ((577,),))
    )
    outputs = [blank((90, 577), dtype) for _ in range(2)]
    numbers = {"epsilon": 1e-5, "variance_size": 0}
    return Op("add_rms_norm", [x, residual, weight, *outputs], numbers)


def layer_norm(dtype: torch.dtype) -> Op:
    x, out = random(1, 90, 577, dtype=dtype), blank((90, 577), dtype)
    return Op("layer_norm", [x, None, None, out], {"epsilon": 1e-5})


def decode(dtype: torch.dtype) -> Op:
    """Contexts of several parts, whose results threads put together."""
    call = build(1, Heads(2, 3, 64, 16), [[900], [40], [517]], Rules(), dtype)
    return call.op(call.output())


def prefill(dtype: torch.dtype) -> Op:
    call = build(1, Heads(2, 3, 64, 16), [[*range(100, 190)]], Rules(window=70), dtype)
    return call.op(call.output())


def encoder(dtype: torch.dtype) -> Op:
    query, out = random(1, 300, 6, 32, dtype=dtype), blank((300, 6, 32), dtype)
    key, value = random(2, 300, 2, 32, dtype=dtype), random(3, 300, 2, 32, dtype=dtype)
    starts = torch.tensor([0, 1, 200, 290], dtype=torch.int32)
    return Op("encoder_attention", [query, key, value, starts, out], {"scale": 0.2})


def elementwise(dtype: torch.dtype) -> Op:
    x, out = random(1, 90, 577, dtype=dtype), blank((90, 577), dtype)
    return Op("elementwise", [x, out], text="i0 gelu i0 exp add")


def argmax(dtype: torch.dtype) -> Op:
    x = random(1, 40, 577, dtype=torch.float32).round().to(dtype)
    return Op("argmax", [x, blank((40,), torch.int64)])


def gated_experts(dtype: torch.dtype) -> Op:
    weight, experts = pack(random(1, 9, 320, 90, dtype=dtype)), chosen()
    tensors = [random(2, 40, 90, dtype=dtype), weight, None, experts, blank((40, 3, 160), dtype)]
    return Op("gated_experts", tensors, {"limit": 1, "offset": 1}, text="silu")


def combine_experts(dtype: torch.dtype) -> Op:
    weight, bias = pack(random(1, 9, 600, 90, dtype=dtype)), random(2, 9, 600, dtype=dtype)
    x, weights = random(3, 40, 3, 90, dtype=dtype), random(4, 40, 3, dtype=dtype)
    return Op("combine_experts", [x, weight, bias, chosen(), weights, blank((40, 600), dtype)])


def chosen() -> torch.Tensor:
    """Three of nine experts for each of 40 tokens, the first one's by most."""
    return torch.arange(40)[:, None] * torch.tensor([0, 1, 5]) % 9


MAKERS: tuple[Callable[[torch.dtype], Op], ...] = (
    linear,
    gated_linear,
    add_rms_norm,
    layer_norm,
    decode,
    prefill,
    encoder,
    elementwise,
    argmax,
    gated_experts,
    combine_experts,
)


@each_level
@each_dtype
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_threads_and_runs(isa: str, dtype: torch.dtype, make: Callable[[torch.dtype], Op]) -> None:
    op = make(dtype)
    run(op, isa)
    expected = [out.clone() for out in op.outputs()]
    program = Loaded([op], isa)
    for count in THREADS:
        pool = _native.Pool(cpus(count))
        for _ in range(3):
            for out in op.outputs():
                out.fill_(7)
            program.run(pool)
            for out, values in zip(op.outputs(), expected, strict=True):
                assert_same_bits(out, values)


@each_level
@each_dtype
def test_a_whole_program(isa: str, dtype: torch.dtype) -> None:
    """Commands that read what others have written, many of them of few tasks."""
    results = []
    for count in THREADS:
        ops, out = layers(dtype)
        program, pool = Loaded(ops, isa), _native.Pool(cpus(count))
        for _ in range(10):
            program.run(pool)
            results.append(out.clone())
    for result in results:
        assert_same_bits(result, results[0])


def layers(dtype: torch.dtype) -> tuple[list[Op], torch.Tensor]:
    """Norm, gated linear and linear over a residual, 8 times from the same start."""
    width, inner, rows = 96, 160, 7
    weights = [
        pack(random(i, *s, dtype=dtype) / 8)
        for i, s in enumerate(((2 * inner, width), (width, inner)))
    ]
    start, x, normed = (random(9, rows, width, dtype=dtype) for _ in range(3))
    hidden = blank((rows, inner), dtype)
    numbers = {"epsilon": 1e-5, "variance_size": 0}
    ops = [Op("copy", [start, x])]
    for _ in range(8):
        ops.append(Op("rms_norm", [x, None, normed], numbers))
        ops.append(Op("gated_linear", [normed, weights[0], None, hidden], text="silu"))
        ops.append(Op("linear", [hidden, weights[1], None, x, x], text="none"))
    return ops, x
