# SPDX-License-Identifier: Apache-2.0
"""What a program refuses to be built from, and what it says."""

import math
from dataclasses import replace

import pytest

from rbln_host import _native
from tests.unit.host.native.commands import F32, I32, I64, VALID, CommandSpec, Spec

BF16 = "bfloat16"
HUGE = 1 << 40


@pytest.mark.parametrize("spec", VALID.values(), ids=VALID)
def test_the_valid_ones_are(spec: CommandSpec) -> None:
    spec.program()


def refuse(spec: CommandSpec, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{spec.op}: .*{message}"):
        spec.program()


TENSORS = [
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
]


@pytest.mark.parametrize(("op", "index", "spec", "message"), TENSORS)
def test_tensors(op: str, index: int, spec: Spec | None, message: str) -> None:
    refuse(VALID[op].with_tensor(index, spec), message)


@pytest.mark.parametrize("op", VALID)
def test_any_tensor(op: str) -> None:
    """What holds for every operand, tried on the first and the last."""
    valid = VALID[op]
    refuse(valid.with_tensor(0, None), "first tensor is missing")
    for index in (0, len(valid.tensors) - 1):
        spec = valid.tensors[index]
        assert spec is not None
        for shape, strides, message in (
            ((), (), "1 to 5 axes"),
            ((1,) * 6, None, "1 to 5 axes"),
            (spec.shape, spec.all_strides()[1:], "stride for each axis"),
            ((-1, *spec.shape[1:]), spec.all_strides(), "impossible size"),
            (spec.shape, (-1, *spec.all_strides()[1:]), "stride is impossible"),
            ((1 << 47, *spec.shape[1:]), spec.all_strides(), "impossible size"),
            (spec.shape, (1 << 47, *spec.all_strides()[1:]), "stride is impossible"),
            ((HUGE, HUGE, 0), None, "too large"),
        ):
            bad = replace(spec, shape=shape, strides=strides)
            with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
                valid.with_tensor(index, bad).program(bases=valid.bases())


@pytest.mark.parametrize("op", VALID)
def test_bounds(op: str) -> None:
    """Every operand, by one element: at the end, at the start, by its stride."""
    valid = VALID[op]
    for index, spec in enumerate(valid.tensors):
        assert spec is not None
        short = valid.bases()
        short[index] -= 1
        with pytest.raises(ValueError, match=f"^{op}: .* leaves base {index} "):
            valid.program(bases=short)
        for offset in (4, -4, -8, 1, 1 << 62, -(1 << 62)):
            with pytest.raises(ValueError, match=f"^{op}: .* leaves base {index} "):
                valid.with_tensor(index, replace(spec, offset=offset)).program(bases=valid.bases())
        for base in (-1, len(valid.tensors), 1 << 30):
            with pytest.raises(ValueError, match=f"^{op}: base {base} does not exist"):
                valid.with_tensor(index, replace(spec, base=base)).program()


@pytest.mark.parametrize("op", VALID)
def test_number_of_tensors(op: str) -> None:
    valid = VALID[op]
    for tensors in ((), valid.tensors[:-1], (*valid.tensors, Spec((1,)))):
        if op != "elementwise" or not tensors:
            refuse(replace(valid, tensors=tensors), "tensors")
    eleven = replace(VALID["elementwise"], tensors=(Spec((1,)),) * 11)
    refuse(eleven, "too many")


NUMBERS = [
    (op, name, value)
    for op, name, values in (
        ("rms_norm", "epsilon", (-1.0, math.nan, math.inf)),
        ("rms_norm", "variance_size", (-1, 0.5, 7, math.nan, 1e300)),
        ("add_rms_norm", "epsilon", (-1.0,)),
        ("add_rms_norm", "variance_size", (7,)),
        ("layer_norm", "epsilon", (-1e-9, math.nan)),
        ("rotary", "neox", (-1, 2, math.nan)),
        ("rotary_write_kv", "neox", (2,)),
        ("paged_attention", "scale", (math.nan, math.inf)),
        ("paged_attention", "soft_cap", (-1.0, math.nan)),
        ("paged_attention", "window", (-1, 1.5, math.inf)),
        ("embedding", "packed", (2,)),
        ("embedding", "rows", (0, 6, 8, -1, 7.5)),
        ("embedding", "width", (4, 6, -1)),
    )
    for value in (*values, None)
]


@pytest.mark.parametrize(("op", "name", "value"), NUMBERS)
def test_numbers(op: str, name: str, value: float | None) -> None:
    valid = VALID[op]
    numbers = {**valid.numbers, name: value}
    if value is None:
        del numbers[name]
    refuse(replace(valid, numbers=numbers), f"(number {name}|{name} is|width|size)")


@pytest.mark.parametrize("op", ["linear", "gated_linear", "gated_activation"])
@pytest.mark.parametrize("text", ["", "swish", "SILU", "silu "])
def test_activations(op: str, text: str) -> None:
    refuse(replace(VALID[op], text=text), f"unknown activation '{text}'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "leaves no single value"),
        ("i0 i1", "leaves no single value"),
        ("i0 add", "'add' lacks a value"),
        ("neg", "'neg' lacks a value"),
        ("i0 i2 add", "an input does not exist"),
        ("i0 i9 add", "an input does not exist"),
        ("i-1", "unknown word 'i-1'"),
        ("i10", "unknown word 'i10'"),
        ("i", "unknown word 'i'"),
        ("i99999999999999999999", "unknown word"),
        ("c", "unknown word 'c'"),
        ("c1.0x", "unknown word"),
        ("i0 pow", "unknown word 'pow'"),
        (" ".join(["i0"] * 9 + ["add"] * 8), "stack is too deep"),
        ("i0 " * 100000, "stack is too deep"),
    ],
)
def test_expressions(text: str, message: str) -> None:
    refuse(replace(VALID["elementwise"], text=text), message)


def test_the_deepest_expression() -> None:
    text = " ".join(["i0"] * 8 + ["add"] * 7)
    replace(VALID["elementwise"], text=text).program()


def test_packed_embedding() -> None:
    packed = {"packed": 1, "rows": 7, "width": 5}
    valid = replace(VALID["embedding"], numbers=packed).with_tensor(0, Spec((1, 5, 16)))
    valid.program()
    refuse(valid.with_tensor(0, Spec((7, 5))), "packed weight")
    refuse(valid.with_tensor(0, Spec((2, 5, 16))), "packed weight")
    halves = valid.with_tensor(2, Spec((3, 5), BF16))
    halves.with_tensor(0, Spec((1, 3, 16, 2), BF16)).program()
    refuse(halves.with_tensor(0, Spec((1, 2, 16, 2), BF16)), "packed weight")


def test_names() -> None:
    with pytest.raises(ValueError, match=r"^conv: there is no such operator"):
        CommandSpec("conv", (Spec((1,)),)).program()
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        _native.Tensor(0, 0, "int8", [1], [1])
    with pytest.raises(ValueError, match="instruction set 'sse9' is not one"):
        VALID["copy"].program(isa="sse9")


def test_a_pool_needs_a_cpu() -> None:
    with pytest.raises(ValueError, match="at least one CPU"):
        _native.Pool([])


def test_what_must_be_bound() -> None:
    pool = _native.Pool([0])
    program = VALID["copy"].program()
    with pytest.raises(ValueError, match="run: base 0 is not bound"):
        program.run(pool)
    with pytest.raises(ValueError, match="base 1 needs 60 bytes, not 59"):
        program.bind(1, 4096, 59)
    with pytest.raises(ValueError, match="the address is null"):
        program.bind(1, 0, 60)
    for base in (-1, 2):
        with pytest.raises(ValueError, match=f"base {base} does not exist"):
            program.bind(base, 4096, 60)


def test_a_program_of_nothing() -> None:
    _native.Program([], [], "portable").run(_native.Pool([0]))


def test_too_many_commands() -> None:
    command = VALID["copy"].command()
    with pytest.raises(ValueError, match="too many commands"):
        _native.Program([command] * 65535, VALID["copy"].bases(), "portable")
    _native.Program([command] * 65534, VALID["copy"].bases(), "portable")
