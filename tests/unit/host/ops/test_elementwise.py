# SPDX-License-Identifier: Apache-2.0
"""``rbln::elementwise``: its operators, its rounding, its dtypes, and programs it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_host.ops import elementwise
from rbln_host.ops.elementwise import BINARY, UNARY

VALUES = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])

EXACT: dict[str, Any] = {
    "neg": lambda x: -x,
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sin": math.sin,
    "cos": math.cos,
    "relu": lambda x: max(x, 0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "square": lambda x: x * x,
    "cube": lambda x: x**3,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": max,
    "minimum": min,
}


def test_every_operator_has_a_formula() -> None:
    assert set(EXACT) == {*UNARY, *BINARY}


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_formula(name: str) -> None:
    left = VALUES if name in {"log", "sqrt", "rsqrt"} else torch.cat((VALUES, -VALUES))
    right = torch.linspace(-1, 2, len(left)) + 0.1
    unary = name in UNARY
    inputs = [left] if unary else [left, right]
    output = elementwise(inputs, f"i0 {name}" if unary else f"i0 i1 {name}")
    rows = zip(*[tensor.tolist() for tensor in inputs], strict=True)
    exact = torch.tensor([EXACT[name](*row) for row in rows])
    torch.testing.assert_close(output, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_nan_wins(name: str) -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert elementwise([nan, nan.flip(0)], f"i0 i1 {name}").isnan().all()


def test_order_of_the_stack() -> None:
    three, two = torch.tensor([3.0]), torch.tensor([2.0])
    assert elementwise([three, two], "i0 i1 sub").item() == 1.0
    assert elementwise([three, two], "i0 i1 c10.0 sub div").item() == 3.0 / -8.0
    assert elementwise([three], "i0 i0 mul c-1.5 add").item() == 7.5


@pytest.mark.parametrize("text", ["1e-05", "inf", "-inf", "nan", "-0.0", "3.4e+38"])
def test_constants(text: str) -> None:
    (value,) = elementwise([torch.zeros(1)], f"i0 c{text} add").tolist()
    expected = float(torch.tensor(float(text)))
    assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_the_value_is_rounded_once() -> None:
    big = torch.tensor([256.0]).bfloat16()
    one = torch.ones(1).bfloat16()
    assert elementwise([big, one], "i0 i1 add i0 sub").item() == 1.0


def test_broadcasts_and_is_contiguous() -> None:
    column, row = torch.arange(3.0)[:, None], torch.arange(4.0)
    output = elementwise([column, row], "i0 i1 add")
    assert torch.equal(output, column + row)
    alone = elementwise([column, torch.zeros(3, 4).T.contiguous().T], "i0")
    assert torch.equal(alone, column.expand(3, 4))
    assert alone.is_contiguous()


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(2).bfloat16(), torch.ones(2)),
        (torch.ones(2).bfloat16(), torch.ones(2).half()),
        (torch.ones(2).bfloat16(), torch.tensor(1.0)),
        (torch.tensor(1.0).bfloat16(), torch.tensor(1.0)),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()),
    ],
)
def test_the_dtype_is_torchs(inputs: tuple[Tensor, Tensor]) -> None:
    assert elementwise(inputs, "i0 i1 mul").dtype == torch.result_type(*inputs)


def test_inputs_are_left_alone() -> None:
    value = torch.ones(3)
    output = elementwise([value], "i0")
    assert output.data_ptr() != value.data_ptr()


BAD = [
    "",
    "i0 ",
    "i0  neg",
    "i1",
    "i01",
    "i-1",
    "c",
    "c1",
    "c1.00",
    "c+1.0",
    "c1_0.0",
    "cInfinity",
    "add",
    "i0 add",
    "i0 i0",
    "i0 pow",
    "__import__",
    "i0 c1.0\n",
    "i0 " * 9 + "add " * 7 + "add",
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("program", BAD)
def test_a_program_that_is_not_well_formed_is_refused(program: str, device: str) -> None:
    with pytest.raises(ValueError, match="elementwise"):
        torch.ops.rbln.elementwise([torch.ones(2, device=device)], program)


def test_depth_and_inputs_up_to_the_limit() -> None:
    eight = [torch.full((2,), float(i)) for i in range(8)]
    program = " ".join(f"i{i}" for i in range(8)) + " add" * 7
    assert elementwise(eight, program).tolist() == [28.0, 28.0]
    with pytest.raises(ValueError, match="inputs"):
        elementwise([*eight, eight[0]], "i0")
    with pytest.raises(ValueError, match="inputs"):
        elementwise([], "c1.0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="dtype"):
        elementwise([torch.ones(2), torch.ones(2, dtype=dtype)], "i0 i1 add")


def test_capture_sees_what_eager_gives() -> None:
    inputs = [torch.ones(4, 1).bfloat16(), torch.ones(3, 4).T]
    real = torch.ops.rbln.elementwise(inputs, "i0 i1 mul")
    fake = torch.ops.rbln.elementwise([t.to("meta") for t in inputs], "i0 i1 mul")
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
