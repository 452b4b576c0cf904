# SPDX-License-Identifier: Apache-2.0
"""`rbln::rms_norm` and `rbln::fused_add_rms_norm` against torch and the formula in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import fused_add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def formula(hidden: Tensor, weight: Tensor | None, epsilon: float, variance_size: int) -> Tensor:
    exact = hidden.double()
    measured = exact[..., :variance_size] if variance_size else exact
    normed = exact / torch.sqrt((measured * measured).mean(dim=-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.double()


def assert_near(output: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 5),
    size=st.integers(2, 40),
    dtype=st.sampled_from(list(TOLERANCE)),
    weighted=st.booleans(),
    variance_size=st.sampled_from((0, 1, 2)),
    magnitude=st.sampled_from((1e-3, 1.0, 50.0)),
)
def test_equals_the_formula(
    *,
    rows: int,
    size: int,
    dtype: torch.dtype,
    weighted: bool,
    variance_size: int,
    magnitude: float,
) -> None:
    torch.manual_seed(rows * size)
    hidden = (torch.randn(rows, size) * magnitude).to(dtype)
    residual = torch.randn(rows, size).to(dtype)
    # Mean squares over one or two features may be tiny; keep them away from 0.
    hidden[..., :2] = hidden[..., :2].sign() * magnitude
    weight = torch.randn(size).to(dtype) if weighted else None
    output = rms_norm(hidden, weight, 1e-6, variance_size)
    assert_near(output, formula(hidden, weight, 1e-6, variance_size))
    normed, new_residual = fused_add_rms_norm(hidden, residual, weight, 1e-2, variance_size)
    total = hidden.float() + residual.float()
    assert torch.equal(new_residual, total.to(dtype))
    assert_near(normed, formula(total, weight, 1e-2, variance_size))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_equals_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 33).to(dtype), torch.randn(33).to(dtype)
    theirs = torch.nn.functional.rms_norm(hidden, (33,), weight, 1e-5)
    tolerance = TOLERANCE[dtype]
    ours = rms_norm(hidden, weight, 1e-5, 0)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_sum_is_not_rounded_before_it_is_normalised() -> None:
    hidden = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    normed, _ = fused_add_rms_norm(hidden, residual, None, 0.0, 0)
    exact = formula(torch.tensor([[257.0, 1.0]]), None, 0.0, 0)
    assert torch.equal(normed, exact.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_inputs_are_left_alone_and_outputs_are_new(dtype: torch.dtype) -> None:
    hidden, residual = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    before = hidden.clone(), residual.clone()
    outputs = (
        rms_norm(hidden, None, 1e-6, 0),
        *fused_add_rms_norm(hidden, residual, None, 1e-6, 0),
    )
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])
    memory = {t.untyped_storage().data_ptr() for t in (*outputs, hidden, residual)}
    assert len(memory) == 5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    hidden, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    together = rms_norm(hidden, weight, 1e-6, 0)
    alone = torch.cat([rms_norm(row[None], weight, 1e-6, 0) for row in hidden])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    "hidden", [torch.randn(3, 8), torch.randn(8, 3).T, torch.randn(3, 16)[:, :8]]
)
def test_capture_sees_the_strides_that_eager_gives(hidden: Tensor) -> None:
    fake = torch.empty_strided(hidden.shape, hidden.stride(), device="meta")
    real = torch.ops.rbln.rms_norm(hidden, None, 1e-6, 0)
    assert torch.ops.rbln.rms_norm(fake, None, 1e-6, 0).stride() == real.stride()
