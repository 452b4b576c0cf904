# SPDX-License-Identifier: Apache-2.0
"""``rbln::rotary_embedding`` and ``rbln::rotary_write_kv`` against complex multiplication."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_host.ops import rotary_embedding, rotary_write_kv, write_kv

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
POSITIONS = 16


def table(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] / 10.0 ** torch.arange(0, 1, 2 / size)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def turned(hidden: Tensor, positions: Tensor, cos_sin: Tensor, *, neox: bool) -> Tensor:
    """Pairs of features as complex numbers, multiplied by ``cos + i sin``."""
    size = cos_sin.shape[1]
    half, rotated = size // 2, hidden[..., :size].double()
    rows = cos_sin.double()[positions.long()][:, None]
    factor = torch.complex(rows[..., :half], rows[..., half:])
    if neox:
        product = torch.complex(rotated[..., :half], rotated[..., half:]) * factor
        joined = torch.cat((product.real, product.imag), dim=-1)
    else:
        product = torch.complex(rotated[..., ::2], rotated[..., 1::2]) * factor
        joined = torch.view_as_real(product).flatten(-2)
    return torch.cat((joined, hidden[..., size:].double()), dim=-1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [2, 8, 12])
@pytest.mark.parametrize("neox", [True, False])
def test_equals_complex_multiplication(
    dtype: torch.dtype, index: torch.dtype, size: int, *, neox: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, 12).to(dtype)
    positions, cos_sin = torch.tensor([0, 3, 15, 3, 7], dtype=index), table(size, dtype)
    output = rotary_embedding(hidden, positions, cos_sin, neox)
    assert output.dtype == dtype
    exact = turned(hidden, positions, cos_sin, neox=neox)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(output[..., size:], hidden[..., size:])


def test_products_are_not_rounded_between() -> None:
    """1.0078125² - 1.015625 is 2⁻¹⁴; the square rounded to bf16 would leave nothing."""
    cos_sin = torch.tensor([[1.0078125, 1.0]]).bfloat16()
    hidden = torch.tensor([[[1.0078125, 1.015625]]]).bfloat16()
    output = rotary_embedding(hidden, torch.zeros(1, dtype=torch.int64), cos_sin, True)
    assert output[0, 0, 0].item() == 2**-14


@pytest.mark.parametrize("position", [-1, POSITIONS])
def test_a_position_outside_the_table_is_refused(position: int) -> None:
    with pytest.raises(IndexError):
        rotary_embedding(torch.ones(1, 1, 8), torch.tensor([position]), table(8), True)


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_write_kv_is_its_parts(*, neox: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 32)
    query, key, value = (p.view(3, -1, 8) for p in qkv.split([16, 8, 8], dim=-1))
    positions, slots, cos_sin = torch.tensor([2, 9, 0]), torch.tensor([5, -1, 0]), table(8)
    kv_cache = torch.randn(3, 1, 4, 16)
    expected_cache = kv_cache.clone()
    rotated = rotary_write_kv(query, key, value, positions, cos_sin, kv_cache, slots, neox)
    write_kv(rotary_embedding(key, positions, cos_sin, neox), value, expected_cache, slots)
    assert torch.equal(rotated, rotary_embedding(query, positions, cos_sin, neox))
    assert rotated.is_contiguous()
    assert torch.equal(kv_cache, expected_cache)
    assert torch.equal(qkv, torch.cat([p.reshape(3, -1) for p in (query, key, value)], dim=-1))


Q, P, T = torch.ones(2, 3, 8), torch.tensor([0, 1]), table(8)
BAD: list[tuple[Tensor, Tensor, Tensor]] = [
    (torch.ones(2, 24), P, T),
    (Q, torch.tensor([0]), T),
    (Q, P, table(10)),
    (Q, P, T[:, :7]),
    (Q, P, T.half()),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("args", BAD)
def test_what_does_not_fit_is_refused(args: tuple[Tensor, ...], device: str) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        torch.ops.rbln.rotary_embedding(*[a.to(device) for a in args], True)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (torch.ops.rbln.rotary_embedding, (torch.ones(3, 2, 8).transpose(0, 1), P, T, True)),
        (
            torch.ops.rbln.rotary_write_kv,
            (Q, Q[:, :1], Q[:, 1:2], P, T, torch.ones(2, 1, 4, 16), P, False),
        ),
    ],
)
def test_capture_sees_what_eager_gives(operator: Any, args: tuple[Any, ...]) -> None:
    real = operator(*args)
    fake = operator(*[a.to("meta") if isinstance(a, Tensor) else a for a in args])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
