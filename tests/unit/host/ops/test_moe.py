# SPDX-License-Identifier: Apache-2.0
"""``rbln::route``, ``rbln::gated_experts`` and ``rbln::combine_experts`` against plain sums."""

import pytest
import torch
from torch import Tensor

from rbln_host.ops import combine_experts, gated_experts, route

DTYPES = {torch.float32: 2e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}
TOKENS, EXPERTS, CHOICES, HIDDEN, INNER = 5, 3, 2, 12, 8


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CHOSEN = torch.tensor([[0, 2], [2, 1], [-1, 0], [3, 3], [1, 0]])
"""The last number of the third and both of the fourth token's experts are none."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_and_expert_at_a_time(dtype: torch.dtype) -> None:
    x, up = random(TOKENS, HIDDEN, dtype=dtype), random(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype)
    down, shares = random(EXPERTS, HIDDEN, INNER, dtype=dtype), random(TOKENS, 2, dtype=dtype)
    up_bias, down_bias = random(EXPERTS, 2 * INNER, dtype=dtype), random(EXPERTS, HIDDEN)
    down_bias = down_bias.to(dtype)
    gated = gated_experts(x, up, up_bias, CHOSEN, "quick_gelu", 2.0, 1.0)
    output = combine_experts(gated, down, down_bias, CHOSEN, shares)
    limit = DTYPES[dtype]
    for token in range(TOKENS):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for place, expert in enumerate(CHOSEN[token].tolist()):
            if not 0 <= expert < EXPERTS:
                assert not gated[token, place].any()
                continue
            both = up[expert].double() @ x[token].double() + up_bias[expert].double()
            gate, linear = both[:INNER].clamp(max=2), both[INNER:].clamp(-2, 2)
            exact = gate / (1 + torch.exp(-1.702 * gate)) * (linear + 1)
            torch.testing.assert_close(gated[token, place].double(), exact, rtol=limit, atol=limit)
            part = down[expert].double() @ gated[token, place].double() + down_bias[expert]
            total += shares[token, place].double() * part
        torch.testing.assert_close(output[token].double(), total, rtol=1e-2, atol=limit)


def test_route_keeps_order_among_equals() -> None:
    weights, experts = route(torch.tensor([[1.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0]]), 2, True)
    assert experts.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert experts.dtype == torch.int64


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_route_refuses(top_k: int) -> None:
    with pytest.raises(ValueError, match="of 4 experts cannot be chosen"):
        route(torch.zeros(2, 4), top_k, True)


def test_shapes_that_do_not_fit() -> None:
    x, up, chosen = torch.zeros(5, 12), torch.zeros(3, 16, 12), torch.zeros(5, 2, dtype=torch.int64)
    bad = [
        (x[:, :11], up, None, chosen),
        (x[:4], up, None, chosen),
        (x, up[:, :15], None, chosen),
        (x, up.half(), None, chosen),
        (x, up, torch.zeros(3, 12), chosen),
        (x, up, None, chosen.float()),
        (x, up, None, chosen[0]),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match=r"gated_experts: .* do not fit"):
            gated_experts(*arguments, "silu", 0.0, 0.0)
    with pytest.raises(ValueError, match="activation 'swish'"):
        gated_experts(x, up, None, chosen, "swish", 0.0, 0.0)
    gated, down, shares = torch.zeros(5, 2, 8), torch.zeros(3, 12, 8), torch.zeros(5, 2)
    for wrong in (
        (gated, down, None, chosen, shares[:, :1]),
        (gated, down, None, chosen, shares.half()),
        (gated, down[..., :7], None, chosen, shares),
        (gated[:, 0], down, None, chosen, shares),
    ):
        with pytest.raises(ValueError, match=r"combine_experts: .* do not fit"):
            combine_experts(*wrong)


def test_fake_results_are_like_real_ones() -> None:
    with torch.device("meta"):
        x, up = torch.zeros(5, 12, dtype=torch.half), torch.zeros(3, 16, 12, dtype=torch.half)
        weights, experts = torch.ops.rbln.route(torch.zeros(5, 3), 2, True)
        gated = torch.ops.rbln.gated_experts(x, up, None, experts, "silu", 0.0, 0.0)
        down = torch.zeros(3, 12, 8, dtype=torch.half)
        out = torch.ops.rbln.combine_experts(gated, down, None, experts, weights.half())
    assert [tuple(t.shape) for t in (weights, experts, gated, out)] == [
        (5, 2), (5, 2), (5, 2, 8), (5, 12)
    ]  # fmt: skip
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert gated.dtype == out.dtype == torch.half
