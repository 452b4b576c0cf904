# SPDX-License-Identifier: Apache-2.0
"""What a program refuses to be built from, whatever the operator, and what it says."""

import math
from dataclasses import replace

import pytest

from rbln_host import _native
from tests.unit.host.native.commands import VALID, CommandSpec, Spec
from tests.unit.host.native.refusal import refuse

BF16 = "bfloat16"
HUGE = 1 << 40


@pytest.mark.parametrize("spec", VALID.values(), ids=VALID)
def test_the_valid_ones_are(spec: CommandSpec) -> None:
    spec.program()


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
            refuse(replace(valid, tensors=tensors), "(tensors|an A for|a B for|axes|missing)")
    thirteen = replace(VALID["elementwise"], tensors=(Spec((1,)),) * 13)
    refuse(thirteen, "too many")


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
        ("route", "renormalise", (-1, 2, math.nan)),
        ("gated_experts", "limit", (-1, math.nan, math.inf)),
        ("gated_experts", "offset", (math.nan, math.inf)),
        ("lora_shrink", "parts", (0, 5, math.nan)),
        ("lora_shrink", "modules.1", (-1, 0.5)),
        ("lora_linear", "parts", (0, -1, 1e300)),
        ("lora_linear", "starts.0", (-1, 0.5)),
        ("lora_gated_linear", "sizes.1", (-1, math.inf)),
    )
    for value in (*values, None)
]


@pytest.mark.parametrize(("op", "name", "value"), NUMBERS)
def test_numbers(op: str, name: str, value: float | None) -> None:
    valid = VALID[op]
    numbers = {key: number for key, number in valid.numbers.items() if key != name}
    if value is not None:
        numbers[name] = value
    refuse(replace(valid, numbers=numbers), f"(number {name}|{name} is|width|size)")


@pytest.mark.parametrize("op", ["linear", "gated_linear", "gated_activation", "gated_experts"])
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
        ("i12", "unknown word 'i12'"),
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


@pytest.mark.parametrize(
    "spec",
    [
        VALID["rms_norm"].with_tensor(0, Spec((0, HUGE))).with_tensor(1, None),
        VALID["layer_norm"].with_tensor(0, Spec((0, HUGE))).with_tensor(1, None),
        VALID["paged_attention"].with_tensor(0, Spec((0, 1 << 34, 16))),
        VALID["copy"].with_tensor(0, Spec((HUGE, 0))),
    ],
    ids=lambda spec: spec.op,
)
def test_empty_outputs_need_nothing(spec: CommandSpec) -> None:
    """Neither memory nor time, however large their other axes are."""
    first = spec.tensors[0]
    assert first is not None
    last = len(spec.tensors) - 1
    spec = spec.with_tensor(last, replace(first, dtype=first.dtype))
    if spec.op == "paged_attention":
        spec = spec.with_tensor(3, Spec((0,), "int32")).with_tensor(4, None).with_tensor(5, None)
    if spec.op == "layer_norm":
        spec = spec.with_tensor(2, None)
    program = spec.program()
    for base, size in enumerate(spec.bases()):
        program.bind(base, 4096, size)
    program.run(_native.Pool([0]))


def test_a_program_of_nothing() -> None:
    _native.Program([], [], "portable").run(_native.Pool([0]))


def test_too_many_commands() -> None:
    command = VALID["copy"].command()
    with pytest.raises(ValueError, match="too many commands"):
        _native.Program([command] * 65535, VALID["copy"].bases(), "portable")
    _native.Program([command] * 65534, VALID["copy"].bases(), "portable")
