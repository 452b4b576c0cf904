# SPDX-License-Identifier: Apache-2.0
"""A transformer layer in the fused operators, small and by hand, with what it takes to run it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_host.compiler.graph import Captured, Command, Graph, Ref, TensorSpec

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 40, 32, 4, 2, 16, 48
BLOCK, BLOCKS, TABLE = 4, 6, 3
QUERY, PAIR = HEADS * HEAD, 2 * KV_HEADS * HEAD


def fused(operator: str, *args: object, out: tuple[str | None, ...]) -> Command:
    """`out = operator(*args)`; strings that start with `%` are values."""

    def placed(argument: object) -> object:
        if isinstance(argument, str) and argument.startswith("%"):
            return Ref(argument)
        if isinstance(argument, tuple):
            return tuple(placed(item) for item in argument)
        return argument

    name, _, overload = operator.partition(".")
    return Command(name, overload or "default", tuple(map(placed, args)), {}, out, len(out) > 1)


def commands() -> tuple[Command, ...]:
    """Embedding, one layer, final norm, logits and the next token."""
    heads = (-1, HEADS, HEAD)
    pairs = (-1, KV_HEADS, HEAD)
    sizes = (QUERY, PAIR // 2, PAIR // 2)
    return (
        fused("aten::embedding", "%p_embed", "%ids", out=("%h0",)),
        fused("rbln::rms_norm", "%h0", "%p_norm", 1e-5, 0, out=("%n0",)),
        fused("rbln::linear", "%n0", "%p_qkv", "%p_bias", None, "none", out=("%qkv",)),
        fused("aten::split_with_sizes", "%qkv", sizes, 1, out=("%q", "%k", "%v")),
        fused("aten::view", "%q", heads, out=("%qh",)),
        fused("aten::view", "%k", pairs, out=("%kh",)),
        fused("aten::view", "%v", pairs, out=("%vh",)),
        fused(
            "rbln::rotary_write_kv",
            *("%qh", "%kh", "%vh", "%positions", "%p_rope", "%kv", "%slots", True),
            out=("%qr",),
        ),
        fused(
            "rbln::paged_attention",
            *("%qr", "%kv", "%table", "%query_pos", HEAD**-0.5, 0, 0.0, None, None),
            out=("%ah",),
        ),
        fused("aten::view", "%ah", (-1, QUERY), out=("%a",)),
        fused("rbln::linear", "%a", "%p_out", None, "%h0", "none", out=("%h1",)),
        fused("rbln::rms_norm", "%h1", "%p_norm", 1e-5, 0, out=("%n1",)),
        fused("rbln::gated_linear", "%n1", "%p_gate_up", None, "silu", out=("%g",)),
        fused("rbln::linear", "%g", "%p_down", None, None, "none", out=("%d",)),
        fused("rbln::fused_add_rms_norm", "%d", "%h1", "%p_norm", 1e-5, 0, out=("%n2", None)),
        fused("rbln::elementwise", ("%n2", "%p_norm"), "i0 c0.5 mul i1 add", out=("%e",)),
        fused("rbln::linear", "%e", "%p_embed", None, None, "none", out=("%logits",)),
        fused("aten::argmax", "%logits", -1, out=("%next",)),
    )


@dataclass(frozen=True)
class Layer:
    """The program for some tokens, its weights, and inputs for one step."""

    captured: Captured
    inputs: dict[str, Tensor]


def layer(tokens: int, dtype: torch.dtype, *extra: Command, outputs: tuple[str, ...] = ()) -> Layer:
    """One sequence of ``tokens`` tokens from position 0; ``extra`` commands follow the layer's."""
    torch.manual_seed(tokens)
    weights = {name: tensor.to(dtype) for name, tensor in _weights().items()}
    integers = TensorSpec((tokens,), torch.int64)
    graph = Graph(
        "layer",
        {
            "%ids": TensorSpec((tokens,), torch.int32),
            "%positions": integers,
            "%slots": integers,
            "%query_pos": TensorSpec((tokens,), torch.int32),
            "%table": TensorSpec((1, TABLE), torch.int32),
            "%kv": TensorSpec((-1, KV_HEADS, BLOCK, 2 * HEAD), dtype),
        },
        {f"%p_{name}": name for name in weights},
        (*commands(), *extra),
        outputs or ("%logits", "%next", "%n2"),
    )
    return Layer(Captured(graph, weights), step_inputs(tokens, dtype))


def step_inputs(tokens: int, dtype: torch.dtype, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """A prompt at the first positions, in scattered blocks of an empty pool."""
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    positions = torch.arange(tokens)
    slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return {
        "%ids": (positions * 7 % VOCABULARY).int(),
        "%positions": positions,
        "%slots": slots,
        "%query_pos": positions.int(),
        "%table": table,
        "%kv": torch.zeros(blocks, KV_HEADS, BLOCK, 2 * HEAD, dtype=dtype),
    }


def _weights() -> dict[str, Tensor]:
    angles = torch.outer(torch.arange(16.0), 1 / 100 ** (torch.arange(0, HEAD, 2) / HEAD))
    return {
        "embed": torch.randn(VOCABULARY, HIDDEN),
        "norm": torch.rand(HIDDEN) + 0.5,
        "qkv": torch.randn(QUERY + PAIR, HIDDEN) / HIDDEN**0.5,
        "bias": torch.randn(QUERY + PAIR),
        "out": torch.randn(HIDDEN, QUERY) / QUERY**0.5,
        "gate_up": torch.randn(2 * INNER, HIDDEN) / HIDDEN**0.5,
        "down": torch.randn(HIDDEN, INNER) / INNER**0.5,
        "rope": torch.cat((angles.cos(), angles.sin()), dim=1),
    }
