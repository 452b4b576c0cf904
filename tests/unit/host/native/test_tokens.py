# SPDX-License-Identifier: Apache-2.0
"""Runs that compute the rows of the first tokens only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rbln_host import _native
from rbln_host.compiler.pack import pack
from tests.unit.host.native.commands import VALID
from tests.unit.host.native.programs import CPUS, Op, assert_same_bits, blank, random, run, spread
from tests.unit.host.native.strategies import each_dtype, each_level

TOKENS = 21
COUNTS = (0, 1, 2, 13, TOKENS - 1, TOKENS, TOKENS + 5)


def rows(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Of all tokens, with a gap between them."""
    return spread(random(seed, TOKENS, *shape, dtype=dtype), gaps=[0] * (len(shape) - 1) + [3])


def linear(dtype: torch.dtype) -> Op:
    weight = pack(random(1, 40, 33, dtype=dtype))
    tensors = [rows(2, 33, dtype=dtype), weight, None, rows(3, 40, dtype=dtype), None]
    return Op("linear", [*tensors[:4], blank((TOKENS, 40), dtype)], text="silu", by_token=True)


def gated_linear(dtype: torch.dtype) -> Op:
    weight = pack(random(1, 64, 33, dtype=dtype))
    tensors = [rows(2, 33, dtype=dtype), weight, None, blank((TOKENS, 32), dtype)]
    return Op("gated_linear", tensors, text="silu", by_token=True)


def gated_activation(dtype: torch.dtype) -> Op:
    tensors = [rows(2, 3, 34, dtype=dtype), blank((TOKENS, 3, 17), dtype)]
    return Op("gated_activation", tensors, text="gelu", by_token=True)


def rms_norm(dtype: torch.dtype) -> Op:
    numbers = {"epsilon": 1e-5, "variance_size": 0}
    tensors = [rows(2, 3, 33, dtype=dtype), None, blank((TOKENS, 3, 33), dtype)]
    return Op("rms_norm", tensors, numbers, by_token=True)


def add_rms_norm(dtype: torch.dtype) -> Op:
    numbers = {"epsilon": 1e-5, "variance_size": 0}
    inputs = [rows(2, 33, dtype=dtype), rows(3, 33, dtype=dtype), None]
    outputs = [blank((TOKENS, 33), dtype) for _ in range(2)]
    return Op("add_rms_norm", [*inputs, *outputs], numbers, by_token=True)


def layer_norm(dtype: torch.dtype) -> Op:
    tensors = [rows(2, 33, dtype=dtype), None, None, blank((TOKENS, 33), dtype)]
    return Op("layer_norm", tensors, {"epsilon": 1e-5}, by_token=True)


def rotary(dtype: torch.dtype) -> Op:
    tensors = [rows(2, 3, 32, dtype=dtype), ids(9), random(1, 9, 16, dtype=dtype)]
    out = blank((TOKENS, 3, 32), dtype)
    return Op("rotary", [*tensors, out], {"neox": 1}, by_token=True)


def rotary_write_kv(dtype: torch.dtype) -> Op:
    query, key, value = (rows(i, heads, 16, dtype=dtype) for i, heads in enumerate((4, 2, 2)))
    pool, slots = blank((TOKENS, 2, 2, 32), dtype), ids(2 * TOKENS)
    tensors = [query, key, value, ids(9), random(1, 9, 16, dtype=dtype), pool, slots]
    out = blank((TOKENS, 4, 16), dtype)
    return Op("rotary_write_kv", [*tensors, out], {"neox": 0}, by_token=True)


def write_kv(dtype: torch.dtype) -> Op:
    key, value = rows(1, 2, 16, dtype=dtype), rows(2, 2, 16, dtype=dtype)
    pool = blank((TOKENS, 2, 2, 32), dtype)
    return Op("write_kv", [key, value, pool, ids(2 * TOKENS)], by_token=True)


def embedding(dtype: torch.dtype) -> Op:
    tensors = [random(1, 9, 33, dtype=dtype), ids(9), blank((TOKENS, 33), dtype)]
    return Op("embedding", tensors, {"packed": 0, "rows": 9, "width": 33}, by_token=True)


def elementwise(dtype: torch.dtype) -> Op:
    tensors = [rows(2, 2, 33, dtype=dtype), blank((TOKENS, 2, 33), dtype)]
    return Op("elementwise", tensors, text="i0 exp", by_token=True)


def copy(dtype: torch.dtype) -> Op:
    return Op("copy", [rows(2, 33, dtype=dtype), blank((TOKENS, 33), dtype)], by_token=True)


def argmax(dtype: torch.dtype) -> Op:
    return Op("argmax", [rows(2, 33, dtype=dtype), blank((TOKENS,), torch.int64)], by_token=True)


def gated_experts(dtype: torch.dtype) -> Op:
    weight = pack(random(1, 5, 64, 33, dtype=dtype))
    tensors = [rows(2, 33, dtype=dtype), weight, None, chosen(), blank((TOKENS, 3, 32), dtype)]
    numbers = {"limit": 0, "offset": 0}
    return Op("gated_experts", tensors, numbers, text="silu", by_token=True)


def combine_experts(dtype: torch.dtype) -> Op:
    weight, weights = pack(random(1, 5, 40, 33, dtype=dtype)), rows(4, 3, dtype=dtype)
    tensors = [rows(2, 3, 33, dtype=dtype), weight, None, chosen(), weights]
    return Op("combine_experts", [*tensors, blank((TOKENS, 40), dtype)], by_token=True)


def chosen() -> Tensor:
    """Three of five experts for each token."""
    return (torch.arange(TOKENS)[:, None] // 2 + torch.arange(3)) % 5


def ids(count: int) -> Tensor:
    return torch.arange(TOKENS) % count


MAKERS: tuple[Callable[[torch.dtype], Op], ...] = (
    linear,
    gated_linear,
    gated_activation,
    rms_norm,
    add_rms_norm,
    layer_norm,
    rotary,
    rotary_write_kv,
    write_kv,
    embedding,
    elementwise,
    copy,
    argmax,
    gated_experts,
    combine_experts,
)


@each_level
@each_dtype
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_first_rows(isa: str, dtype: torch.dtype, make: Callable[[torch.dtype], Op]) -> None:
    """Are what they are among all. Nothing of the others is read as an index or written."""
    whole = make(dtype)
    run(whole, isa, tokens=TOKENS)
    for count in COUNTS:
        op = make(dtype)
        before = [out.clone() for out in op.outputs()]
        spoil_rows(op, count)
        run(op, isa, _native.Pool([CPUS[0]] * 2), count)
        some = min(count, TOKENS)
        if make in (write_kv, rotary_write_kv):  # each token has its slot: two a block
            kept = whole.outputs()[0].transpose(1, 2).flatten(0, 1)[:some]
            assert_same_bits(op.outputs()[0].transpose(1, 2).flatten(0, 1)[:some], kept)
            continue
        for out, all_rows, untouched in zip(op.outputs(), whole.outputs(), before, strict=True):
            assert_same_bits(out[:some], all_rows[:some])
            assert_same_bits(out[some:], untouched[some:])


def spoil_rows(op: Op, count: int) -> None:
    """Make the indices of the rows from ``count`` on ones that are out of range."""
    for tensor in op.tensors:
        if tensor is not None and tensor.dtype == torch.int64 and op.name != "argmax":
            tensor[count:] = 1 << 40


@each_level
@each_dtype
def test_other_commands_compute_all(isa: str, dtype: torch.dtype) -> None:
    x, out = random(1, 5, 20, dtype=dtype), blank((5, 20), dtype)
    run(Op("copy", [x, out]), isa, tokens=2)
    assert_same_bits(out, x)


def test_a_negative_number_of_tokens() -> None:
    program = VALID["copy"].program()
    with pytest.raises(ValueError, match="run: the number of tokens is negative"):
        program.run(_native.Pool([0]), -1)
