# SPDX-License-Identifier: Apache-2.0
"""Random valid commands of every operator, of small and odd sizes and strides with gaps."""

import random
from collections.abc import Callable
from dataclasses import replace

from tests.unit.host.native.commands import CommandSpec, Spec

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
Random = random.Random


def loose(rng: Random, shape: tuple[int, ...], dtype: str, last_free: bool = False) -> Spec:
    """Strides with gaps, leading axes in any order; the last axis innermost unless it is free."""
    axes = list(range(len(shape) if last_free else len(shape) - 1))
    rng.shuffle(axes)
    if not last_free:
        axes.insert(0, len(shape) - 1)
    strides, step = [0] * len(shape), 1
    for axis in axes:
        strides[axis] = step
        step = step * max(1, shape[axis]) + rng.choice((0, 0, 1, 5))
    return Spec(shape, dtype, tuple(strides))


def some_shape(rng: Random, most: int = 4) -> tuple[int, ...]:
    leading = [rng.randint(0, 3) for _ in range(rng.randint(0, most - 1))]
    return (*leading, rng.choice((0, 1, 3, 15, 16, 17, 33)))


def maybe(rng: Random, spec: Spec) -> Spec | None:
    return spec if rng.random() < 0.6 else None


def activation(rng: Random) -> str:
    return rng.choice(("none", "relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "tanh", "relu2"))


def packed(columns: int, width: int, dtype: str, *experts: int) -> Spec:
    groups = -(-columns // 16)
    if dtype == "bfloat16":
        return Spec((*experts, groups, -(-width // 2), 16, 2), dtype)
    return Spec((*experts, groups, width, 16), dtype)


def linear(rng: Random, dtype: str) -> CommandSpec:
    rows, width, columns = rng.randint(0, 14), rng.randint(1, 35), rng.randint(1, 70)
    x, bias = loose(rng, (rows, width), dtype), maybe(rng, Spec((columns,), dtype))
    residual = maybe(rng, loose(rng, (rows, columns), dtype))
    tensors = (x, packed(columns, width, dtype), bias, residual, loose(rng, (rows, columns), dtype))
    return CommandSpec("linear", tensors, {}, activation(rng))


def gated_linear(rng: Random, dtype: str) -> CommandSpec:
    rows, width, columns = rng.randint(0, 14), rng.randint(1, 35), 16 * rng.randint(1, 3)
    bias = maybe(rng, Spec((2 * columns,), dtype))
    weight, out = packed(2 * columns, width, dtype), loose(rng, (rows, columns), dtype)
    tensors = (loose(rng, (rows, width), dtype), weight, bias, out)
    return CommandSpec("gated_linear", tensors, {}, activation(rng))


def gated_activation(rng: Random, dtype: str) -> CommandSpec:
    shape = some_shape(rng)
    x = loose(rng, (*shape[:-1], 2 * shape[-1]), dtype)
    return CommandSpec("gated_activation", (x, loose(rng, shape, dtype)), {}, activation(rng))


def rms_norm(rng: Random, dtype: str) -> CommandSpec:
    shape = (*some_shape(rng)[:-1], rng.choice((1, 15, 16, 17, 33)))
    numbers = {"epsilon": 1e-5, "variance_size": float(rng.randint(0, shape[-1]))}
    one = [loose(rng, shape, dtype) for _ in range(4)]
    weight = maybe(rng, Spec(shape[-1:], rng.choice((dtype, "float32"))))
    if rng.random() < 0.5:
        return CommandSpec("rms_norm", (one[0], weight, one[1]), numbers)
    return CommandSpec("add_rms_norm", (one[0], one[1], weight, one[2], one[3]), numbers)


def layer_norm(rng: Random, dtype: str) -> CommandSpec:
    shape = (*some_shape(rng)[:-1], rng.choice((1, 15, 16, 17, 33)))
    weight, bias = (maybe(rng, Spec(shape[-1:], dtype)) for _ in range(2))
    tensors = (loose(rng, shape, dtype), weight, bias, loose(rng, shape, dtype))
    return CommandSpec("layer_norm", tensors, {"epsilon": 1e-5})


def rotary(rng: Random, dtype: str) -> CommandSpec:
    tokens, heads, kv_heads, size = (
        rng.randint(0, 4),
        rng.randint(1, 3),
        rng.randint(1, 3),
        rng.choice((2, 6, 16, 34, 64)),
    )
    neox = {"neox": float(rng.randint(0, 1))}
    query, out = (loose(rng, (tokens, heads, size), dtype) for _ in range(2))
    positions = loose(rng, (tokens,), rng.choice(INTEGERS), last_free=True)
    table = loose(rng, (10, 2 * rng.randint(0, size // 2)), dtype)
    if rng.random() < 0.3:
        return CommandSpec("rotary", (query, positions, table, out), neox)
    key, value = (loose(rng, (tokens, kv_heads, size), dtype) for _ in range(2))
    pool = loose(rng, (rng.randint(1, 3), kv_heads, rng.randint(1, 5), 2 * size), dtype)
    slots = loose(rng, (tokens,), rng.choice(INTEGERS), last_free=True)
    if rng.random() < 0.5:
        return CommandSpec("write_kv", (key, value, pool, slots))
    tensors = (query, key, value, positions, table, pool, slots, out)
    return CommandSpec("rotary_write_kv", tensors, neox)


def encoder_attention(rng: Random, dtype: str) -> CommandSpec:
    kv_heads, group, size = rng.randint(1, 2), rng.randint(1, 5), rng.choice((16, 48, 64))
    tokens, rows = rng.choice((0, 1, 5, 17, 40)), rng.randint(0, 3)
    query, out = (loose(rng, (tokens, kv_heads * group, size), dtype) for _ in range(2))
    key, value = (loose(rng, (tokens, kv_heads, size), dtype) for _ in range(2))
    starts = loose(rng, (rows + 1,), rng.choice(INTEGERS), last_free=True)
    return CommandSpec("encoder_attention", (query, key, value, starts, out), {"scale": 0.3})


def attention(rng: Random, dtype: str) -> CommandSpec:
    kv_heads, group, size = rng.randint(1, 2), rng.randint(1, 5), rng.choice((16, 48, 64))
    batch, queries, heads = rng.randint(1, 3), rng.choice((0, 1, 2, 15, 16, 17)), kv_heads * group
    query, out = (loose(rng, (batch * queries, heads, size), dtype) for _ in range(2))
    pool = loose(rng, (rng.randint(6, 8), kv_heads, rng.choice((1, 3, 16)), 2 * size), dtype)
    table = loose(rng, (batch, rng.randint(0, 9)), "int32", last_free=True)
    positions = loose(rng, (batch * queries,), rng.choice(INTEGERS), last_free=True)
    sinks = maybe(rng, Spec((heads,), rng.choice((dtype, "float32"))))
    slopes = maybe(rng, Spec((heads,)))
    numbers = {"scale": 0.3, "window": float(rng.choice((0, 0, 1, 5))), "soft_cap": 0.0}
    tensors = (query, pool, table, positions, sinks, slopes, out)
    return CommandSpec("paged_attention", tensors, numbers)


def embedding(rng: Random, dtype: str) -> CommandSpec:
    rows, width, tokens = rng.randint(8, 20), rng.choice((1, 15, 16, 33)), rng.randint(0, 5)
    is_packed = rng.random() < 0.5
    table = packed(rows, width, dtype) if is_packed else loose(rng, (rows, width), dtype)
    ids = loose(rng, (tokens,), rng.choice(INTEGERS), last_free=True)
    numbers = {"packed": float(is_packed), "rows": float(rows), "width": float(width)}
    return CommandSpec("embedding", (table, ids, loose(rng, (tokens, width), dtype)), numbers)


def elementwise(rng: Random, _dtype: str) -> CommandSpec:
    shape, count = some_shape(rng, most=5), rng.randint(1, 8)
    tensors = []
    for _ in range(count):
        spec = loose(rng, shape, rng.choice(FLOATS), last_free=True)
        strides = tuple(stride * (rng.random() < 0.8) for stride in spec.all_strides())
        tensors.append(replace(spec, strides=strides))
    tensors.append(loose(rng, shape, rng.choice(FLOATS), last_free=True))
    words = [
        "i0",
        *(word for i in range(1, count) for word in (f"i{i}", rng.choice(("add", "mul")))),
    ]
    return CommandSpec("elementwise", tuple(tensors), {}, " ".join([*words, "exp"]))


def copy(rng: Random, _dtype: str) -> CommandSpec:
    shape = some_shape(rng, most=5)
    source, target = (loose(rng, shape, rng.choice((*FLOATS, *INTEGERS)), True) for _ in range(2))
    return CommandSpec("copy", (source, target))


def argmax(rng: Random, dtype: str) -> CommandSpec:
    rows, width = rng.randint(0, 4), rng.choice((1, 15, 16, 17, 40))
    out = loose(rng, (rows,), "int64", last_free=True)
    return CommandSpec("argmax", (loose(rng, (rows, width), dtype), out))


def mask_tokens(rng: Random, dtype: str) -> CommandSpec:
    rows, width = rng.randint(0, 4), rng.choice((1, 31, 32, 33, 100))
    mask = loose(rng, (rows, (width + 31) // 32), "int32")
    return CommandSpec("mask_tokens", (mask, loose(rng, (rows, width), dtype)))


def sample(rng: Random, dtype: str) -> CommandSpec:
    rows, width = rng.randint(0, 4), rng.choice((1, 15, 16, 17, 300))
    dtypes = ("float32", "int32", "float32", "int64", "int64", "int64", "float32")
    each = [loose(rng, (rows,), dtype, last_free=True) for dtype in dtypes]
    mask = maybe(rng, loose(rng, (rows, (width + 31) // 32), "int32"))
    logits = loose(rng, (rows, width), dtype)
    return CommandSpec("sample", (logits, *each[:5], mask, *each[5:]))


def route(rng: Random, dtype: str) -> CommandSpec:
    rows, experts = rng.randint(0, 20), rng.choice((1, 2, 15, 16, 17, 33))
    chosen = (rows, rng.randint(1, experts))
    logits, weights = loose(rng, (rows, experts), dtype), loose(rng, chosen, dtype)
    tensors = (logits, weights, loose(rng, chosen, "int64", last_free=True))
    return CommandSpec("route", tensors, {"renormalise": float(rng.randint(0, 1))})


def experts(rng: Random, dtype: str) -> CommandSpec:
    rows, width, inner = rng.randint(0, 9), rng.randint(1, 35), 16 * rng.randint(1, 3)
    count, choices = rng.randint(1, 4), rng.randint(1, 4)
    chosen = loose(rng, (rows, choices), rng.choice(INTEGERS), last_free=True)
    if rng.random() < 0.5:
        bias = maybe(rng, loose(rng, (count, 2 * inner), dtype))
        weight, x = packed(2 * inner, width, dtype, count), loose(rng, (rows, width), dtype)
        tensors = (x, weight, bias, chosen, loose(rng, (rows, choices, inner), dtype))
        numbers = {"limit": rng.choice((0.0, 1.0)), "offset": rng.choice((0.0, 1.0))}
        return CommandSpec("gated_experts", tensors, numbers, activation(rng))
    x, out = loose(rng, (rows, choices, width), dtype), loose(rng, (rows, inner - 3), dtype)
    weight, bias = packed(inner - 3, width, dtype, count), loose(rng, (count, inner - 3), dtype)
    shares = (maybe(rng, bias), chosen, loose(rng, (rows, choices), dtype))
    return CommandSpec("combine_experts", (x, weight, *shares, out))


def lora(rng: Random, dtype: str) -> CommandSpec:
    """Any of the three, of parts that may leave columns out."""
    base = gated_linear(rng, dtype) if rng.random() < 0.5 else linear(rng, dtype)
    x, out = base.tensors[0], base.tensors[-1]
    assert x is not None
    assert out is not None
    columns = out.shape[1] * (2 if base.op == "gated_linear" else 1)
    parts, slots, rank = rng.randint(1, 4), rng.randint(0, 3), rng.choice((1, 3, 4, 17))
    sizes = [rng.randint(1, columns) for _ in range(parts)]
    modules = rng.randint(1, 5)
    numbers = {"parts": float(parts)}
    for part, size in enumerate(sizes):
        numbers[f"modules.{part}"] = float(rng.randint(0, modules - 1))
        numbers[f"starts.{part}"] = float(rng.randint(0, columns - size))
        numbers[f"sizes.{part}"] = float(size)
    named = loose(rng, (x.shape[0],), rng.choice(INTEGERS), last_free=True)
    ranks = loose(rng, (modules, slots), rng.choice(INTEGERS), last_free=True)
    shrunk = loose(rng, (x.shape[0], parts * rank), "float32")
    if rng.random() < 0.4:
        a = [Spec((slots, rank, x.shape[1]), dtype) for _ in sizes]
        return CommandSpec("lora_shrink", (x, named, ranks, *a, shrunk), numbers)
    b = [Spec((slots, -(-size // 16), rank, 16), dtype) for size in sizes]
    tensors = (*base.tensors[:-1], shrunk, named, ranks, *b, out)
    return CommandSpec(f"lora_{base.op}", tensors, numbers, base.text)


MAKERS: tuple[Callable[[Random, str], CommandSpec], ...] = (
    linear, gated_linear, gated_activation, rms_norm, layer_norm, rotary, attention,
    encoder_attention, embedding, elementwise, copy, argmax, mask_tokens, sample, route, experts,
    lora, lora, lora,
)  # fmt: skip


def random_command(rng: Random) -> CommandSpec:
    """Of any operator and dtype."""
    return rng.choice(MAKERS)(rng, rng.choice(FLOATS))
