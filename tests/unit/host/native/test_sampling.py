# SPDX-License-Identifier: Apache-2.0
"""Bitmasks and draws of the kernels: against the eager reference, and against statistics."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host import _native
from rbln_host.ops import mask_tokens, sample
from tests.unit.host.native.programs import CPUS, LEVELS, Loaded, Op, assert_same_bits, blank, run
from tests.unit.host.native.strategies import each_dtype, each_level, few, many, placed

BEST = LEVELS[-1]
DRAWS = 1_000_000
WIDTHS = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 300, 513, 4999)
"""Vocabularies: the edges of vectors of 16, words of 32, blocks of 256 and groups of a top-k."""
temperatures = st.sampled_from((1.0, 0.01, 0.7, 3.0, 1e30, math.inf, 1e-5, 9e-6, 0.0, math.nan))
top_ks = st.sampled_from((-1, 0, 1, 2, 5, 16, 17, 100, 1000, 1 << 30))
top_ps = st.sampled_from((1.0, 0.9, 0.5, 0.999999, 1e-9, 0.0, -1.0, 2.0, math.nan))


@dataclass
class Rows:
    """Parameters of rows, each with draws of its own."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.top_k, self.top_p, self.seed, self.position


def rows_of(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 5
) -> Rows:
    return Rows(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), seed),
        torch.arange(rows),
    )


def drawn(
    logits: Tensor,
    rows: Rows,
    isa: str = BEST,
    pool: _native.Pool | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Tokens; memory around the outputs is watched."""
    return drawn_with_thresholds(logits, rows, isa, pool, mask)[0]


def drawn_with_thresholds(
    logits: Tensor,
    rows: Rows,
    isa: str = BEST,
    pool: _native.Pool | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    count = logits.shape[0]
    token, threshold = blank((count,), torch.int64), blank((count,), torch.float32)
    run(Op("sample", [logits, *rows.tensors, mask, token, threshold]), isa, pool)
    return token, threshold


def random_mask(seed: int, rows: int, width: int) -> Tensor:
    """Words of all kinds; some rows allow everything, nothing or little."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, -(-width // 32))
    mask = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    share = torch.rand(rows, 1, generator=generator)
    mask[torch.rand(shape, generator=generator) < share] = 0
    mask[torch.rand(shape, generator=generator) < 0.4 * share] = -1
    kind = torch.randint(0, 6, (rows,), generator=generator)
    mask[kind == 0], mask[kind == 1] = -1, 0
    return mask


def logits_of(seed: int, rows: int, width: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * scale


@each_level
@each_dtype
@many
@given(st.data())
def test_against_the_reference(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """The same tokens from the same random numbers, and the same thresholds."""
    count, width = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(WIDTHS))
    logits = logits_of(data.draw(st.integers(0, 1 << 20)), count, width)
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    if data.draw(st.booleans()):
        logits[logits_of(7, count, width) < 3.0] = -torch.inf
    rows = rows_of(count)
    for row in range(count):
        rows.temperature[row] = data.draw(temperatures)
        rows.top_k[row], rows.top_p[row] = data.draw(top_ks), data.draw(top_ps)
        rows.seed[row] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1))
        rows.position[row] = data.draw(st.sampled_from((0, 1, -1, 1 << 40)))
    mask = None
    if data.draw(st.booleans()):
        mask = placed(data.draw, random_mask(data.draw(st.integers(0, 999)), count, width))
    logits = placed(data.draw, logits.to(dtype))
    token, threshold = drawn_with_thresholds(logits, rows, isa, mask=mask)
    expected_token, expected_threshold = sample(logits, *rows.tensors, mask)
    assert token.tolist() == expected_token.tolist()
    assert threshold.tolist() == expected_threshold.tolist()


@each_level
def test_one_row_does_not_see_another(isa: str) -> None:
    """Rows that are not finite, or have any parameters, leave their neighbours as they are."""
    logits = logits_of(1, 6, 700)
    rows = rows_of(6, temperature=0.8, top_k=30, top_p=0.9)
    alone = [drawn(logits[i : i + 1], one_row(rows, i), isa).item() for i in range(6)]
    logits[0] = torch.nan
    logits[2, 7], logits[2, 9] = torch.inf, torch.inf
    logits[4] = -torch.inf
    rows.temperature[5], rows.top_k[5], rows.top_p[5] = torch.nan, -(2**31), torch.nan
    tokens = drawn(logits, rows, isa).tolist()
    assert [tokens[1], tokens[3]] == [alone[1], alone[3]]
    assert (tokens[0], tokens[4]) == (0, 0)
    assert tokens[2] in (7, 9)
    assert tokens[5] == int(logits[5].argmax()), "NaN is no temperature"


def one_row(rows: Rows, row: int) -> Rows:
    return Rows(*(tensor[row : row + 1].clone() for tensor in rows.tensors))


@each_level
@each_dtype
def test_what_is_forbidden_is_not_there(isa: str, dtype: torch.dtype) -> None:
    """The tokens of a vocabulary of the allowed ones alone; of others not even NaN is seen."""
    count, width = 6, 1500
    logits, mask = logits_of(11, count, width).to(dtype), random_mask(3, count, width)
    mask[0, ::2], mask[1, 3:], mask[2] = 0, 0, 0
    mask[2, -1] = 1 << (width - 1) % 32
    allowed = (mask.unsqueeze(-1) >> torch.arange(32) & 1).flatten(1)[:, :width] != 0
    logits[~allowed] = torch.nan
    for rows in (rows_of(count, 0.8, 30), rows_of(count, top_p=0.9), rows_of(count, 0.0)):
        tokens = drawn(logits, rows, isa, mask=mask).tolist()
        for row in range(count):
            (ids,) = allowed[row].nonzero(as_tuple=True)
            if len(ids):
                alone = drawn(logits[row : row + 1, ids].contiguous(), one_row(rows, row), isa)
                assert tokens[row] == ids[int(alone)]
            else:
                assert tokens[row] == 0
        assert tokens[2] == width - 1


@each_level
@pytest.mark.parametrize("top_p", [0.5, 0.63, 0.9, 0.99])
def test_top_p_of_many_light_tokens(isa: str, top_p: float) -> None:
    """Those that are as good as never drawn one by one may be most of the weight together."""
    logits = logits_of(13, 40, 4999, 0.3) - 9.5
    logits[:, 7] = 0.0
    rows = rows_of(40, top_p=top_p)
    token, threshold = drawn_with_thresholds(logits, rows, isa)
    expected_token, expected_threshold = sample(logits, *rows.tensors)
    assert threshold.tolist() == expected_threshold.tolist()
    assert token.tolist() == expected_token.tolist()


def rows_of_shape(shape: str, width: int) -> Tensor:
    """Rows of a vocabulary so large that top-p's search begins with a part of them."""
    logits = logits_of(17, 3, width)
    vectors = torch.arange(width) // 16
    if shape == "few heavy":
        logits[:, torch.randperm(width, generator=torch.Generator().manual_seed(1))[:40]] += 15.0
    elif shape == "one far above":
        logits[:, 5001] += 90.0
    elif shape == "most far below":
        logits[:, 100:] -= 1e4
    elif shape == "ties":
        logits = logits.round()
    elif shape == "all equal":
        logits[:] = 1.5
    elif shape == "sampled are light":
        logits[:, vectors % 10 == 0] -= 9.0
    elif shape == "sampled are heavy":
        logits[:, vectors % 10 == 0] += 9.0
    elif shape == "sampled are never":
        logits[:, (vectors % 10 == 0) | (vectors % 32 == 0)] = -torch.inf
    return logits


@each_level
@pytest.mark.parametrize(
    "shape",
    [
        "normal",
        "few heavy",
        "one far above",
        "most far below",
        "ties",
        "all equal",
        "sampled are light",
        "sampled are heavy",
        "sampled are never",
    ],
)
def test_top_p_of_a_large_vocabulary(isa: str, shape: str) -> None:
    """Wherever the threshold lies: among the values looked at first, or not."""
    logits = rows_of_shape(shape, 10 * 96 * 16 + 5)
    for top_p in (1e-3, 0.5, 0.9, 0.99):
        for temperature in (0.5, 3.0):
            rows = rows_of(3, temperature=temperature, top_p=top_p)
            token, threshold = drawn_with_thresholds(logits, rows, isa)
            expected_token, expected_threshold = sample(logits, *rows.tensors)
            assert threshold.tolist() == expected_threshold.tolist()
            assert token.tolist() == expected_token.tolist()


@each_level
def test_padding_is_not_read(isa: str) -> None:
    logits = torch.full((3, 100), torch.nan)
    rows = rows_of(3)
    rows.position[:] = -1
    rows.temperature[1], rows.top_k[1] = torch.nan, 1 << 30
    token, threshold = drawn_with_thresholds(logits, rows, isa)
    assert token.tolist() == [0, 0, 0]
    assert threshold.tolist() == [0, 0, 0]


@each_level
def test_threads_and_rows_do_not_matter(isa: str) -> None:
    logits, rows = logits_of(3, 40, 3000), rows_of(40, top_p=0.95)
    expected = drawn(logits, rows, isa)
    for threads in (2, 5):
        pool = _native.Pool([CPUS[i % len(CPUS)] for i in range(threads)])
        assert drawn(logits, rows, isa, pool).tolist() == expected.tolist()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = Rows(*(tensor[order] for tensor in rows.tensors))
    assert drawn(logits[order].contiguous(), moved, isa).tolist() == expected[order].tolist()


@pytest.mark.parametrize("isa", LEVELS)
def test_levels_agree(isa: str) -> None:
    logits, rows = logits_of(4, 64, 5000), rows_of(64, temperature=0.9, top_k=200, top_p=0.99)
    assert drawn(logits, rows, isa).tolist() == drawn(logits, rows, "portable").tolist()


class TestSupport:
    """What can be drawn at all."""

    @pytest.mark.parametrize("top_k", [1, 2, 7, 39, 40, 41])
    def test_top_k_with_ties(self, top_k: int) -> None:
        """Values 9, 8, 8, 8, 7, …: all that equal the k-th are in."""
        logits = torch.full((2000, 40), -1.0)
        logits[:, 20], logits[:, 3:6], logits[:, 30] = 9.0, 8.9, 8.8
        found = set(drawn(logits, rows_of(2000, 5.0, top_k)).tolist())
        order = [20, 3, 4, 5, 30]
        kept = set(order[:1] if top_k == 1 else order[:4] if top_k <= 4 else range(40))
        assert found == kept

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(1e-30, 1), (0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.9, 4), (0.96, 5)],
    )
    def test_top_p(self, top_p: float, kept: int) -> None:
        """Of shares 1/2, 1/4, 1/8, … the least number that sums to p."""
        shares = torch.tensor([2.0**-i for i in range(1, 30)])
        rows = rows_of(4000, top_p=top_p)
        assert drawn(shares.log().repeat(4000, 1), rows).max() == kept - 1

    def test_top_p_is_of_what_top_k_leaves(self) -> None:
        shares = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(3000, 1)
        assert set(drawn(shares, rows_of(3000, top_k=2, top_p=0.57)).tolist()) == {0}
        assert set(drawn(shares, rows_of(3000, top_k=2, top_p=0.58)).tolist()) == {0, 1}

    def test_one_token(self) -> None:
        logits = torch.full((50, 777), -torch.inf)
        logits[:, 500] = -3.0
        for rows in (rows_of(50), rows_of(50, top_k=3), rows_of(50, top_p=0.5)):
            assert set(drawn(logits, rows).tolist()) == {500}

    @pytest.mark.parametrize("scale", [1e-30, 1e4, 3e37])
    def test_sizes_of_logits(self, scale: float) -> None:
        logits = logits_of(8, 500, 300, scale)
        for rows in (rows_of(500, top_k=1), rows_of(500, top_p=1e-12), rows_of(500, 1e-5 / scale)):
            assert torch.equal(drawn(logits, rows), logits.argmax(-1)) or scale < 1

    def test_temperature_limits(self) -> None:
        logits = logits_of(9, 1000, 64, 1.0)
        cold = drawn(logits, rows_of(1000, 1e-5))
        assert torch.equal(cold, logits.argmax(-1))
        hot = drawn(logits, rows_of(1000, math.inf))
        assert set(hot.tolist()) == set(range(64))


class TestStatistics:
    """A million draws of the fastest kernel, in rows of one call."""

    def draws(self, shares: Tensor, **parameters: Any) -> Tensor:
        """How often each token is drawn."""
        counts = torch.zeros(shares.shape[0], dtype=torch.int64)
        logits = shares.log().expand(DRAWS // 10, -1)
        rows = rows_of(DRAWS // 10, **parameters)
        token, threshold = torch.empty(DRAWS // 10, dtype=torch.int64), torch.empty(DRAWS // 10)
        program = Loaded([Op("sample", [logits, *rows.tensors, None, token, threshold])], BEST)
        pool = _native.Pool(CPUS[:1])
        for _ in range(10):
            program.run(pool)
            counts += torch.bincount(token, minlength=shares.shape[0])
            rows.position.add_(DRAWS // 10)
        return counts

    @pytest.mark.parametrize(
        ("parameters", "kept"),
        [
            ({}, 40),
            ({"temperature": 0.7}, 40),
            ({"top_k": 12}, 12),
            ({"top_p": 0.8}, None),
            ({"temperature": 1.4, "top_k": 20, "top_p": 0.9}, None),
        ],
        ids=str,
    )
    def test_frequencies(self, parameters: dict[str, Any], kept: int | None) -> None:
        """No token from outside, and a chi-square of the rest within six deviations."""
        shares = logits_of(2, 1, 40, 1.5)[0].softmax(0)
        expected = supported(shares, **parameters)
        counts = self.draws(shares, **parameters)
        outside = expected == 0
        assert counts[outside].sum() == 0
        if kept is not None:
            assert int((~outside).sum()) == kept
        assert_fits(counts[~outside], expected[~outside])

    def test_consecutive_seeds_and_positions_are_independent(self) -> None:
        """Pairs of neighbouring draws over a flat choice of 8: all 64 equally often."""
        logits = torch.zeros(200_000, 8)
        by_position = rows_of(200_000)
        by_seed = rows_of(200_000)
        by_seed.seed, by_seed.position = torch.arange(200_000), torch.zeros(200_000).long()
        for rows in (by_position, by_seed):
            tokens = drawn(logits, rows).view(-1, 2)
            counts = torch.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
            assert_fits(counts, torch.full((64,), 1 / 64, dtype=torch.float64))

    def test_rare_tokens_are_drawn(self) -> None:
        """A share of 10^-5 among 5,000 others, where fp32 sums would lose it."""
        shares = torch.full((5000,), 1.0)
        shares[4999] = 0.05
        counts = torch.zeros(5000, dtype=torch.int64)
        rows = rows_of(20_000)
        logits = shares.log().expand(20_000, -1)
        for _ in range(5):
            counts += torch.bincount(drawn(logits, rows), minlength=5000)
            rows.position.add_(20_000)
        assert counts.sum() == 100_000
        assert_fits(counts[:4999], torch.full((4999,), 1 / 4999, dtype=torch.float64))
        assert counts[4999] <= 12


def supported(
    shares: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Shares after temperature, top-k and top-p, written another way than the reference."""
    shares = (shares.double().log() / temperature).softmax(0)
    order = shares.argsort(descending=True)
    if top_k:
        shares[order[top_k:]] = 0
    shares = shares / shares.sum()
    before = shares[order].cumsum(0) - shares[order]
    shares[order[before >= top_p]] = 0
    return shares / shares.sum()


def assert_fits(counts: Tensor, shares: Tensor) -> None:
    """Pearson's chi-square, which has a mean of n - 1 and a variance of 2 (n - 1)."""
    expected = shares * counts.sum()
    freedom = counts.shape[0] - 1
    square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(square - freedom) < 6 * math.sqrt(2 * freedom) + 1


class TestMasks:
    @each_level
    @each_dtype
    @few
    @given(st.data())
    def test_against_the_reference(self, isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
        rows, width = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(WIDTHS))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
        shape = (rows, -(-width // 32))
        mask = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
        mask[torch.rand(shape, generator=generator) < 0.4] = 0
        mask[torch.rand(shape, generator=generator) < 0.4] = -1
        logits = placed(data.draw, logits_of(1, rows, width).to(dtype))
        expected = logits.clone()
        mask_tokens(mask, expected)
        run(Op("mask_tokens", [mask, logits]), isa)
        assert_same_bits(logits, expected)

    @each_level
    @each_dtype
    def test_free_rows_are_untouched(self, isa: str, dtype: torch.dtype) -> None:
        """Denormal numbers and payloads of NaN too."""
        bits = torch.arange(1, 101, dtype=torch.int32 if dtype == torch.float32 else torch.int16)
        logits = torch.stack([bits, -bits]).view(dtype)
        before = logits.clone()
        mask = torch.full((2, 4), -1, dtype=torch.int32)
        run(Op("mask_tokens", [mask, logits]), isa)
        assert torch.equal(logits.view(bits.dtype), before.view(bits.dtype))

    def test_which_bit_is_which_token(self) -> None:
        mask = torch.tensor([[1 << 3, -(2**31), 1]], dtype=torch.int32)
        for masked in (self.by_kernel, mask_tokens):
            logits = torch.zeros(1, 70)
            masked(mask, logits)
            assert (logits[0] == 0).nonzero().flatten().tolist() == [3, 63, 64]

    def by_kernel(self, mask: Tensor, logits: Tensor) -> None:
        run(Op("mask_tokens", [mask, logits]), BEST)
