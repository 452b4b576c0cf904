# SPDX-License-Identifier: Apache-2.0
"""``rbln::layer_norm`` against its formula."""

import pytest
import torch
from torch import Tensor

from rbln_host.ops import layer_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def formula(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    exact = hidden.double()
    centred = exact - exact.mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + epsilon)
    scaled = normed if weight is None else normed * weight.double()
    return scaled if bias is None else scaled + bias.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_equals_the_formula(
    dtype: torch.dtype, *, weighted: bool, biased: bool, epsilon: float
) -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(3, 5, 40) * 3 + 2).to(dtype)
    weight = torch.randn(40).to(dtype) if weighted else None
    bias = torch.randn(40).to(dtype) if biased else None
    output = layer_norm(hidden, weight, bias, epsilon)
    assert output.dtype == dtype
    tolerance = TOLERANCE[dtype]
    exact = formula(hidden, weight, bias, epsilon)
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


def test_scale_and_shift_are_not_rounded_between() -> None:
    hidden = torch.tensor([[-1.0, 1.0]]).bfloat16()
    weight, bias = torch.full((2,), 257.0).bfloat16(), torch.tensor([-256.0, -256.0]).bfloat16()
    exact = formula(hidden, weight, bias, 0.01).to(torch.bfloat16)
    assert torch.equal(layer_norm(hidden, weight, bias, 0.01), exact)


@pytest.mark.parametrize("hidden", [torch.randn(3, 8), torch.randn(8, 3).T])
def test_capture_sees_what_eager_gives(hidden: Tensor) -> None:
    real = torch.ops.rbln.layer_norm(hidden, None, None, 1e-6)
    fake = torch.ops.rbln.layer_norm(hidden.to("meta"), None, None, 1e-6)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
