# SPDX-License-Identifier: Apache-2.0
"""``rbln::linear``, ``rbln::gated_linear`` and ``rbln::gated_activation`` against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rbln_host.ops import ACTIVATIONS, gated_activation, gated_linear, linear

EXACT = {
    "none": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "tanh": torch.tanh,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}
# One rounding to the dtype of a value computed in fp32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(output: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    assert output.is_contiguous()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


def test_every_activation_has_a_formula() -> None:
    assert set(EXACT) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_equals_the_formula(activation: str, dtype: torch.dtype) -> None:
    hidden, weight = random(2, 3, 24, dtype=dtype), random(10, 24, dtype=dtype)
    bias, residual = random(10, dtype=dtype), random(2, 3, 10, dtype=dtype)
    exact = EXACT[activation](hidden.double() @ weight.double().T + bias.double())
    exact = exact + residual.double()
    assert_near(linear(hidden, weight, bias, residual, activation), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual_are_optional(dtype: torch.dtype) -> None:
    hidden, weight = random(5, 24, dtype=dtype), random(10, 24, dtype=dtype)
    exact = functional.linear(hidden.double(), weight.double())
    assert_near(linear(hidden, weight, None, None, "none"), exact, dtype)


def test_the_sum_is_rounded_once() -> None:
    """256 + 1 rounds to 256 in bf16, and so would lose the residual's -256."""
    ones = torch.ones(1, 257).bfloat16()
    result = linear(ones, ones, None, torch.tensor([[-256.0]]).bfloat16(), "none")
    assert result.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear_equals_the_formula(activation: str, dtype: torch.dtype) -> None:
    hidden, weight = random(4, 24, dtype=dtype), random(20, 24, dtype=dtype)
    bias = random(20, dtype=dtype)
    both = hidden.double() @ weight.double().T + bias.double()
    exact = EXACT[activation](both[:, :10]) * both[:, 10:]
    scale = TOLERANCE[dtype] * exact.abs().max()
    output = gated_linear(hidden, weight, bias, activation)
    assert output.dtype == dtype
    assert float((output.double() - exact).abs().max()) <= float(scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation_equals_the_formula(activation: str, dtype: torch.dtype) -> None:
    both = random(2, 3, 16, dtype=dtype).transpose(0, 1)
    exact = EXACT[activation](both[..., :8].double()) * both[..., 8:].double()
    assert_near(gated_activation(both, activation), exact, dtype)


def test_inputs_are_left_alone_and_outputs_are_new() -> None:
    hidden, weight = random(2, 4, dtype=torch.float32), random(4, 4, dtype=torch.float32)
    before = hidden.clone(), weight.clone()
    result = linear(hidden, weight, None, hidden, "none")
    gated_activation(hidden, "relu")
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])
    assert result.data_ptr() != hidden.data_ptr()


X, W, B = torch.ones(2, 6), torch.ones(4, 6), torch.ones(4)
BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (torch.ops.rbln.linear, (X, W, None, None, "swish"), "swish"),
    (torch.ops.rbln.linear, (X, W.T, None, None, "none"), "do not fit"),
    (torch.ops.rbln.linear, (X, W, torch.ones(6), None, "none"), "do not fit"),
    (torch.ops.rbln.linear, (X, W, B, torch.ones(4), "none"), "residual"),
    (torch.ops.rbln.linear, (X, W, B, torch.ones(2, 4).half(), "none"), "residual"),
    (torch.ops.rbln.linear, (X.half(), W, None, None, "none"), "do not fit"),
    (torch.ops.rbln.gated_linear, (X, torch.ones(3, 6), None, "none"), "halves"),
    (torch.ops.rbln.gated_linear, (X, W, torch.ones(2), "none"), "do not fit"),
    (torch.ops.rbln.gated_linear, (X, W, None, ""), "activation"),
    (torch.ops.rbln.gated_activation, (torch.ones(2, 3), "silu"), "halves"),
    (torch.ops.rbln.gated_activation, (X, "geglu"), "geglu"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("operator", "args", "message"), BAD)
def test_what_does_not_fit_is_refused(
    operator: Any, args: tuple[Any, ...], message: str, device: str
) -> None:
    placed = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    with pytest.raises(ValueError, match=message):
        operator(*placed)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (torch.ops.rbln.linear, (X, W, B, torch.ones(4, 2).T, "relu")),
        (torch.ops.rbln.linear, (torch.ones(3, 2, 6).transpose(0, 1), W, None, None, "none")),
        (torch.ops.rbln.gated_linear, (X, W, B, "silu")),
        (torch.ops.rbln.gated_activation, (torch.ones(6, 2).T, "silu")),
    ],
)
def test_capture_sees_what_eager_gives(operator: Any, args: tuple[Any, ...]) -> None:
    real = operator(*args)
    fake = operator(*[a.to("meta") if isinstance(a, Tensor) else a for a in args])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
