# SPDX-License-Identifier: Apache-2.0
"""What each operator demands of its operands."""

from dataclasses import replace

import pytest

from tests.unit.host.native.commands import (
    F32,
    I32,
    I64,
    OUTPUTS,
    VALID,
    CommandSpec,
    Spec,
)
from tests.unit.host.native.refusal import refuse

BF16 = "bfloat16"


TENSORS = [
    ("lora_shrink", 1, Spec((2,), I32), "slots has the wrong size"),
    ("lora_shrink", 1, Spec((3,), F32), "slots must hold integers"),
    ("lora_shrink", 2, Spec((3, 2), I32), "module has no ranks"),
    ("lora_shrink", 2, Spec((4, 2), F32), "ranks must hold integers"),
    ("lora_shrink", 2, Spec((4, 3), I32), "for each slot"),
    ("lora_shrink", 3, Spec((2, 8, 6)), "of one shape"),
    ("lora_shrink", 4, Spec((2, 8, 5), BF16), "of the input's dtype"),
    ("lora_shrink", 4, Spec((2, 8, 5), strides=(80, 10, 1)), "contiguous"),
    ("lora_shrink", 4, None, "A is missing"),
    ("lora_shrink", 5, Spec((3, 15)), "shrunk has the wrong size"),
    ("lora_shrink", 5, Spec((3, 16), BF16), "shrunk has the wrong dtype"),
    ("lora_shrink", 5, Spec((3, 16), strides=(8, 1)), "output is written"),
    ("lora_linear", 1, Spec((1, 5, 16)), "packed weight"),
    ("lora_linear", 3, Spec((3, 21)), "residual and output have different shapes"),
    ("lora_linear", 4, Spec((3, 8)), "shrunk has the wrong size"),
    ("lora_linear", 5, Spec((4,), I64), "slots has the wrong size"),
    ("lora_linear", 6, Spec((3, 2), I32), "module has no ranks"),
    ("lora_linear", 6, Spec((4, 1), I32), "for each slot"),
    ("lora_linear", 7, Spec((2, 2, 8, 16)), "groups of 16 columns"),
    ("lora_linear", 8, Spec((2, 1, 7, 16)), "groups of 16 columns"),
    ("lora_linear", 8, Spec((2, 1, 8, 16), strides=(256, 128, 16, 1)), "groups of 16 columns"),
    ("lora_linear", 8, Spec((2, 8, 16)), "B has 3 axes"),
    ("lora_gated_linear", 3, Spec((2, 16)), "shrunk has the wrong size"),
    ("lora_gated_linear", 6, Spec((2, 2, 8, 16), BF16), "groups of 16 columns"),
    ("lora_gated_linear", 7, Spec((1, 2, 8, 16)), "groups of 16 columns"),
    ("lora_gated_linear", 8, Spec((3, 20)), "multiple of 16"),
    ("linear", 0, Spec((5,)), "input has 1 axes, not 2"),
    ("linear", 0, Spec((3, 5), I32), "input has the wrong dtype"),
    ("linear", 0, Spec((3, 5), strides=(10, 2)), "input: elements of a row must follow"),
    ("linear", 0, Spec((4, 5)), "different rows"),
    ("linear", 0, Spec((3, 6)), "packed weight does not have the input's width"),
    ("linear", 0, Spec((3, 0)), "without columns"),
    ("linear", 1, None, "weight is not packed"),
    ("linear", 1, Spec((2, 5, 16), BF16), "weight is not packed"),
    ("linear", 1, Spec((2, 5, 16), strides=(96, 16, 1)), "weight is not packed"),
    ("linear", 1, Spec((2, 5, 17)), "packed weight"),
    ("linear", 1, Spec((3, 5, 16)), "packed weight"),
    ("linear", 1, Spec((1, 5, 16)), "packed weight"),
    ("linear", 1, Spec((2, 5, 16, 1)), "packed weight"),
    ("linear", 2, Spec((19,)), "bias has the wrong size"),
    ("linear", 2, Spec((1, 20)), "bias has the wrong size"),
    ("linear", 2, Spec((20,), BF16), "bias has the wrong dtype"),
    ("linear", 2, Spec((20,), strides=(0,)), "bias: elements of a row"),
    ("linear", 3, Spec((3, 21)), "residual and output have different shapes"),
    ("linear", 3, Spec((3, 20), BF16), "residual has the wrong dtype"),
    ("linear", 4, None, "output is missing"),
    ("linear", 4, Spec((3, 20), BF16), "output has the wrong dtype"),
    ("linear", 4, Spec((3, 20), strides=(0, 1)), "output is written"),
    ("linear", 4, Spec((3, 20), strides=(19, 1)), "output is written"),
    ("linear", 4, Spec((3, 0)), "without columns"),
    ("gated_linear", 0, Spec((2, 5)), "different rows"),
    ("gated_linear", 1, Spec((2, 5, 16)), "packed weight"),
    ("gated_linear", 2, Spec((32,)), "bias has the wrong size"),
    ("gated_linear", 3, Spec((3, 20)), "multiple of 16"),
    ("gated_linear", 3, Spec((3, 0)), "multiple of 16"),
    ("gated_linear", 3, Spec((3, 32), strides=(8, 1)), "output is written"),
    ("gated_activation", 0, Spec((2, 3, 11)), "twice as wide"),
    ("gated_activation", 0, Spec((6, 10)), "twice as wide"),
    ("gated_activation", 0, Spec((2, 2, 10)), "twice as wide"),
    ("gated_activation", 0, Spec((2, 3, 10), I64), "input has the wrong dtype"),
    ("gated_activation", 1, Spec((2, 3, 5), BF16), "output has the wrong dtype"),
    ("gated_activation", 1, Spec((2, 3, 5), strides=(5, 5, 1)), "output is written"),
    ("rms_norm", 0, Spec((3, 7)), "different shapes"),
    ("rms_norm", 0, Spec((3, 0)), "different shapes"),
    ("rms_norm", 1, Spec((5,)), "weight has the wrong size"),
    ("rms_norm", 1, Spec((6,), BF16), "weight has the wrong dtype"),
    ("rms_norm", 1, Spec((6,), I32), "weight has the wrong dtype"),
    ("rms_norm", 2, Spec((3, 6), strides=(0, 1)), "output is written"),
    ("add_rms_norm", 1, Spec((3, 5)), "residual and input differ"),
    ("add_rms_norm", 1, None, "residual is missing"),
    ("add_rms_norm", 2, Spec((7,)), "weight has the wrong size"),
    ("add_rms_norm", 3, Spec((3, 5)), "different shapes"),
    ("add_rms_norm", 4, Spec((2, 6)), "residual and input differ"),
    ("add_rms_norm", 4, Spec((3, 6), strides=(5, 1)), "sum is written"),
    ("layer_norm", 1, Spec((1,)), "weight has the wrong size"),
    ("layer_norm", 2, Spec((6,), I32), "bias has the wrong dtype"),
    ("layer_norm", 3, Spec((3, 6), strides=(1, 1)), "output is written"),
    ("layer_norm", 3, Spec((3, 6, 1)), "different shapes"),
    ("rotary", 0, Spec((3, 32)), "input has 2 axes, not 3"),
    ("rotary", 0, Spec((3, 2, 17)), "different shapes"),
    ("rotary", 1, Spec((4,), I64), "positions has the wrong size"),
    ("rotary", 1, Spec((3,), F32), "positions must hold integers"),
    ("rotary", 1, Spec((3, 1), I64), "positions has 2 axes"),
    ("rotary", 2, Spec((9, 7)), "rotary size is odd"),
    ("rotary", 2, Spec((9, 18)), "larger than the head"),
    ("rotary", 2, Spec((9, 8), BF16), "table has the wrong dtype"),
    ("rotary", 3, Spec((3, 2, 16), strides=(32, 8, 1)), "output is written"),
    ("rotary_write_kv", 0, Spec((3, 4, 8)), "different shapes"),
    ("rotary_write_kv", 1, Spec((3, 3, 16)), "keys and values have different shapes"),
    ("rotary_write_kv", 2, Spec((3, 2, 8)), "keys and values have different shapes"),
    ("rotary_write_kv", 4, Spec((9, 8), strides=(16, 2)), "table: elements of a row"),
    ("rotary_write_kv", 5, Spec((4, 3, 8, 32)), "other heads"),
    ("rotary_write_kv", 5, Spec((4, 2, 8, 30)), "other heads"),
    ("rotary_write_kv", 5, Spec((4, 2, 0, 32)), "empty"),
    ("rotary_write_kv", 5, Spec((4, 2, 8, 32), strides=(0, 256, 32, 1)), "KV pool is written"),
    ("rotary_write_kv", 6, Spec((2,), I32), "slots has the wrong size"),
    ("rotary_write_kv", 7, Spec((3, 4, 16), BF16), "output has the wrong dtype"),
    ("write_kv", 0, Spec((3, 2, 16), I32), "key has the wrong dtype"),
    ("write_kv", 1, Spec((3, 2, 16), BF16), "value has the wrong dtype"),
    ("write_kv", 2, None, "KV pool is missing"),
    ("write_kv", 2, Spec((4, 2, 8, 32), strides=(512, 16, 32, 1)), "KV pool is written"),
    ("write_kv", 2, Spec((8, 8, 32)), "KV pool has 3 axes"),
    ("write_kv", 3, Spec((3,), F32), "slots must hold integers"),
    ("paged_attention", 0, Spec((6, 4, 16), BF16), "output has the wrong dtype"),
    ("paged_attention", 0, Spec((6, 3, 16)), "different shapes"),
    ("paged_attention", 1, Spec((4, 3, 8, 32)), "multiple of KV heads"),
    ("paged_attention", 1, Spec((4, 0, 8, 32)), "multiple of KV heads"),
    ("paged_attention", 1, Spec((4, 2, 8, 16)), "other heads"),
    ("paged_attention", 1, Spec((0, 2, 8, 32)), "empty"),
    ("paged_attention", 1, Spec((4, 2, 8, 32), strides=(512, 256, 0, 1)), "KV pool is"),
    ("paged_attention", 2, Spec((3, 2), I64), "block table must be int32"),
    ("paged_attention", 2, Spec((4, 2), I32), "multiple of sequences"),
    ("paged_attention", 2, Spec((0, 2), I32), "multiple of sequences"),
    ("paged_attention", 2, Spec((6,), I32), "block table has 1 axes"),
    ("paged_attention", 2, Spec((3, 1 << 28), I32), "context is longer than 2.31"),
    ("paged_attention", 2, Spec((3, 2), I32, (2, 0)), "block table is broadcast"),
    ("paged_attention", 3, Spec((5,), I32), "positions has the wrong size"),
    ("paged_attention", 4, Spec((3,)), "sinks need one number per head"),
    ("paged_attention", 4, Spec((4,), BF16), "sinks need one number per head"),
    ("paged_attention", 4, Spec((4,), strides=(2,)), "sinks need one number per head"),
    ("paged_attention", 5, Spec((4,), BF16), "alibi slopes has the wrong dtype"),
    ("paged_attention", 5, Spec((5,)), "alibi slopes has the wrong size"),
    ("paged_attention", 6, None, "output is missing"),
    ("paged_attention", 6, Spec((6, 4, 16), strides=(16, 16, 1)), "output is written"),
    ("encoder_attention", 0, Spec((6, 4, 16), BF16), "key has the wrong dtype"),
    ("encoder_attention", 0, Spec((6, 3, 16)), "different shapes"),
    ("encoder_attention", 1, Spec((6, 3, 16)), "keys and values have different shapes"),
    ("encoder_attention", 2, Spec((5, 2, 16)), "keys and values have different shapes"),
    ("encoder_attention", 3, Spec((0,), I32), "the end of the last row"),
    ("encoder_attention", 3, Spec((3,), F32), "must hold integers"),
    ("encoder_attention", 4, None, "output is missing"),
    ("encoder_attention", 4, Spec((6, 4, 16), strides=(16, 16, 1)), "output is written"),
    ("embedding", 0, Spec((7, 5), I32), "output has the wrong dtype"),
    ("embedding", 0, Spec((6, 5)), "table has another size"),
    ("embedding", 0, Spec((7, 6)), "table has another size"),
    ("embedding", 0, Spec((7, 5), strides=(10, 2)), "table: elements of a row"),
    ("embedding", 1, Spec((4,), I32), "ids has the wrong size"),
    ("embedding", 1, None, "ids is missing"),
    ("embedding", 2, Spec((3, 4)), "another width"),
    ("embedding", 2, Spec((3, 5), strides=(0, 1)), "output is written"),
    ("elementwise", 1, Spec((3, 5), I32), "floating point"),
    ("elementwise", 1, None, "floating point"),
    ("elementwise", 1, Spec((3, 1)), "expanded"),
    ("elementwise", 2, Spec((3, 5), strides=(0, 1)), "output is written"),
    ("elementwise", 2, Spec((3, 5), strides=(1, 1)), "output is written"),
    ("elementwise", 2, Spec((3, 5), I64), "floating point"),
    ("copy", 0, Spec((5, 3)), "different shapes"),
    ("copy", 1, None, "different shapes"),
    ("copy", 1, Spec((3, 5), strides=(5, 0)), "target is written"),
    ("copy", 1, Spec((3, 5), strides=(2, 1)), "target is written"),
    ("argmax", 0, Spec((15,)), "rows of at least one"),
    ("argmax", 0, Spec((3, 0)), "rows of at least one"),
    ("argmax", 0, Spec((3, 5), I32), "input has the wrong dtype"),
    ("argmax", 1, Spec((3,), I32), "output must be int64"),
    ("argmax", 1, Spec((2,), I64), "output must be int64"),
    ("argmax", 1, Spec((3,), I64, (0,)), "output is written"),
    ("mask_tokens", 0, Spec((3, 2), I64), "bitmask must be int32"),
    ("mask_tokens", 0, Spec((3, 2), I32, (4, 2)), "words of a row next to each other"),
    ("mask_tokens", 0, Spec((3, 1), I32), "a bit for each token"),
    ("mask_tokens", 0, Spec((3, 3), I32), "a bit for each token"),
    ("mask_tokens", 0, Spec((2, 2), I32), "a row for each row"),
    ("mask_tokens", 1, Spec((3, 40), I32), "logits has the wrong dtype"),
    ("mask_tokens", 1, Spec((3, 40), strides=(80, 2)), "logits: elements of a row must follow"),
    ("mask_tokens", 1, Spec((3, 0)), "no possible size"),
    ("sample", 0, Spec((3, 0)), "no possible size"),
    ("sample", 0, Spec((4, 40)), "temperature has the wrong dtype or size"),
    ("sample", 1, Spec((3,), BF16), "temperature has the wrong dtype or size"),
    ("sample", 2, Spec((3,), I64), "top_k has the wrong dtype or size"),
    ("sample", 3, Spec((3,), I32), "top_p has the wrong dtype or size"),
    ("sample", 4, Spec((3,), I32), "seed has the wrong dtype or size"),
    ("sample", 5, Spec((2,), I64), "position has the wrong dtype or size"),
    ("sample", 5, None, "position is missing"),
    ("sample", 6, Spec((3, 2), I64), "bitmask must be int32"),
    ("sample", 6, Spec((3, 1), I32), "a bit for each token"),
    ("sample", 6, Spec((2, 2), I32), "a row for each row"),
    ("sample", 7, Spec((3,), I32), "token has the wrong dtype or size"),
    ("sample", 8, Spec((3,), BF16), "threshold has the wrong dtype or size"),
    ("route", 0, Spec((4, 8)), "different rows"),
    ("route", 0, Spec((3, 1)), "more experts are chosen than there are"),
    ("route", 1, Spec((3, 3)), "experts has the wrong size"),
    ("route", 1, Spec((3, 2), BF16), "weights has the wrong dtype"),
    ("route", 2, Spec((3, 2), I32), "experts must be int64"),
    ("route", 2, Spec((3, 2)), "experts must hold integers"),
    ("gated_experts", 0, Spec((2, 5)), "different rows"),
    ("gated_experts", 0, Spec((3, 6)), "packed weight"),
    ("gated_experts", 0, Spec((3, 0)), "without columns"),
    ("gated_experts", 1, Spec((0, 4, 5, 16)), "no possible number of experts"),
    ("gated_experts", 1, Spec((6, 3, 5, 16)), "packed weight"),
    ("gated_experts", 1, Spec((6, 4, 5, 16), BF16), "weight is not packed"),
    ("gated_experts", 1, Spec((6, 4, 5, 16), strides=(640, 80, 16, 1)), "weight is not packed"),
    ("gated_experts", 2, Spec((5, 64)), "bias has the wrong size"),
    ("gated_experts", 2, Spec((6, 32)), "bias has the wrong size"),
    ("gated_experts", 3, Spec((3, 3), I64), "experts has the wrong size"),
    ("gated_experts", 3, Spec((3, 2)), "experts must hold integers"),
    ("gated_experts", 4, Spec((3, 2, 24)), "multiple of 16"),
    ("gated_experts", 4, Spec((3, 0, 32)), "experts has the wrong size"),
    ("combine_experts", 0, Spec((4, 2, 5)), "different rows"),
    ("combine_experts", 0, Spec((3, 2, 0)), "without columns"),
    ("combine_experts", 0, Spec((3, 3, 5)), "experts has the wrong size"),
    ("combine_experts", 1, Spec((6, 1, 5, 16)), "packed weight"),
    ("combine_experts", 1, Spec((6, 2, 6, 16)), "packed weight"),
    ("combine_experts", 2, Spec((6, 32)), "bias has the wrong size"),
    ("combine_experts", 4, Spec((3, 1)), "weights has the wrong size"),
    ("combine_experts", 5, Spec((3, 0)), "without columns"),
]


@pytest.mark.parametrize(("op", "index", "spec", "message"), TENSORS)
def test_tensors(op: str, index: int, spec: Spec | None, message: str) -> None:
    refuse(VALID[op].with_tensor(index, spec), message)


ROWS = {
    "linear": (0, 3, 4),
    "gated_linear": (0, 3),
    "gated_activation": (0, 1),
    "rms_norm": (0, 2),
    "add_rms_norm": (0, 1, 3, 4),
    "layer_norm": (0, 3),
    "rotary": (0, 2, 3),
    "rotary_write_kv": (0, 1, 2, 4, 5, 7),
    "write_kv": (0, 1, 2),
    "paged_attention": (0, 1, 6),
    "encoder_attention": (0, 1, 2, 4),
    "embedding": (0, 2),
    "argmax": (0,),
    "sample": (0,),
    "route": (0, 1),
    "gated_experts": (0, 2, 4),
    "combine_experts": (0, 2, 4, 5),
    "lora_shrink": (0,),
    "lora_linear": (0, 3, 4, 9),
    "lora_gated_linear": (0, 3, 8),
}
"""Operands that are read or written by rows."""
AXES = {
    "linear": (0, 4),
    "gated_linear": (0, 3),
    "rotary": (0, 1, 2, 3),
    "rotary_write_kv": (0, 1, 2, 3, 4, 5, 6, 7),
    "write_kv": (0, 1, 2, 3),
    "paged_attention": (0, 1, 2, 3, 6),
    "encoder_attention": (0, 1, 2, 3, 4),
    "embedding": (0, 1, 2),
    "argmax": (1,),
    "mask_tokens": (0, 1),
    "sample": (0, 1, 2, 3, 4, 5, 6, 7, 8),
    "route": (0, 1, 2),
    "gated_experts": (0, 1, 2, 3, 4),
    "combine_experts": (0, 1, 2, 3, 4, 5),
    "lora_shrink": (0, 1, 2, 3, 4, 5),
    "lora_linear": (0, 4, 5, 6, 7, 8, 9),
    "lora_gated_linear": (0, 3, 4, 5, 6, 7, 8),
}
"""Operands whose number of axes is fixed."""


@pytest.mark.parametrize(("op", "index"), [(op, i) for op in ROWS for i in ROWS[op]])
def test_rows(op: str, index: int) -> None:
    """Their elements follow each other, and all have one floating-point dtype."""
    valid = VALID[op]
    spec = valid.tensors[index]
    assert spec is not None
    apart = replace(spec, strides=tuple(2 * stride for stride in spec.all_strides()))
    refuse(valid.with_tensor(index, apart), "elements of a row must follow each other")
    for dtype in (I32, BF16) if index else (I32,):
        refuse(valid.with_tensor(index, replace(spec, dtype=dtype)), "has the wrong dtype")


@pytest.mark.parametrize(("op", "index"), [(op, i) for op in AXES for i in AXES[op]])
def test_axes(op: str, index: int) -> None:
    valid = VALID[op]
    spec = valid.tensors[index]
    assert spec is not None
    axes = len(spec.shape)
    for shape in ((*spec.shape, 1), spec.shape[1:]):
        if shape:
            bad = valid.with_tensor(index, Spec(shape, spec.dtype))
            refuse(bad, f"has {len(shape)} axes, not {axes}")


@pytest.mark.parametrize(
    ("op", "index"), [(op, i % len(VALID[op].tensors)) for op in OUTPUTS for i in OUTPUTS[op]]
)
def test_what_is_written_lies_in_memory_once(op: str, index: int) -> None:
    valid = VALID[op]
    index = min(index, len(valid.tensors) - 1)
    spec = valid.tensors[index]
    assert spec is not None
    for axis, size in enumerate(spec.shape):
        strides = list(spec.all_strides())
        for stride in {0, strides[axis] - 1}:
            strides[axis] = stride
            bad = replace(spec, strides=tuple(strides))
            assert size > 1
            refuse(valid.with_tensor(index, bad), "(elements share memory|elements of a row)")


def test_what_two_operands_must_share() -> None:
    refuse(replace(VALID["paged_attention"], tensors=attention_of_head_size(8)), "multiple of 16")
    refuse(replace(VALID["paged_attention"], tensors=attention_of_head_size(0)), "multiple of 16")
    write = VALID["rotary_write_kv"]
    for shape in ((2, 4, 16), (3, 4, 18)):
        other = write.with_tensor(0, Spec(shape)).with_tensor(7, Spec(shape))
        refuse(other, "queries and keys differ in tokens or head size")
    refuse(write.with_tensor(3, Spec((2,), I64)), "positions has the wrong size")
    nothing = VALID["gated_linear"].with_tensor(0, Spec((3, 0)))
    refuse(nothing.with_tensor(1, Spec((4, 0, 16))), "without columns")
    nothing = VALID["linear"].with_tensor(0, Spec((3, 0)))
    refuse(nothing.with_tensor(1, Spec((2, 0, 16))), "without columns")
    many = Spec((1 << 31, 2), I64, strides=(0, 1))
    huge = VALID["route"].with_tensor(0, Spec((1 << 31, 8))).with_tensor(1, Spec((1 << 31, 2)))
    refuse(huge.with_tensor(2, many), "too many rows")


def test_what_the_heads_of_an_encoder_must_share() -> None:
    valid = VALID["encoder_attention"]

    def with_keys(shape: tuple[int, ...]) -> CommandSpec:
        return valid.with_tensor(1, Spec(shape)).with_tensor(2, Spec(shape))

    refuse(with_keys((5, 2, 16)), "queries and keys differ in tokens or head size")
    refuse(with_keys((6, 2, 32)), "queries and keys differ in tokens or head size")
    refuse(with_keys((6, 3, 16)), "multiple of KV heads")
    refuse(with_keys((6, 0, 16)), "multiple of KV heads")
    eight = with_keys((6, 2, 8)).with_tensor(0, Spec((6, 4, 8))).with_tensor(4, Spec((6, 4, 8)))
    refuse(eight, "multiple of 16")


def attention_of_head_size(size: int) -> tuple[Spec | None, ...]:
    _, _, table, positions, sinks, slopes, _ = VALID["paged_attention"].tensors
    query, pool = Spec((6, 4, size)), Spec((4, 2, 8, 2 * size))
    return (query, pool, table, positions, sinks, slopes, query)
