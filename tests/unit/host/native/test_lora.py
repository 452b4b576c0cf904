# SPDX-License-Identifier: Apache-2.0
"""The adapter kernels against their eager references in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host import _native
from rbln_host.compiler.pack import pack
from rbln_host.ops import lora_gated_linear, lora_linear, lora_shrink
from rbln_host.ops.lora import LANES, pack_b
from tests.unit.host.native.programs import (
    CPUS,
    Op,
    assert_near,
    assert_same_bits,
    blank,
    random,
    run,
    single,
    spread,
    weight_of,
)
from tests.unit.host.native.strategies import (
    each_dtype,
    each_level,
    few,
    placed,
    rows,
    seeds,
    widths,
)

RANKS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)


@dataclass(frozen=True)
class Case:
    """A linear of ``sizes`` output features after each other, the parts of which take adapters.

    What must not be read is poisoned: A and B beyond each rank, and slots that nobody names.
    """

    dtype: torch.dtype
    count: int
    width: int
    sizes: tuple[int, ...]
    rank: int
    slots: int
    seed: int = 0

    @property
    def columns(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        return [sum(self.sizes[:part]) for part in range(len(self.sizes))]

    @property
    def modules(self) -> list[int]:
        """Rows of ``ranks``, neither from the first on nor in order."""
        return [2 * part + 1 for part in reversed(range(len(self.sizes)))]

    def ranks(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2 * len(self.sizes) + 1, self.slots)
        ranks = torch.randint(0, self.rank + 1, shape, generator=generator, dtype=torch.int32)
        ranks[:, 0] = self.rank
        return ranks

    def slots_of(self, least: int = -2) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(least, self.slots, (self.count,), generator=generator)

    def x(self) -> Tensor:
        return random(self.seed + 2, self.count, self.width, dtype=self.dtype)

    def a(self) -> list[Tensor]:
        """``[S, R, K]`` of each part."""
        made = []
        for part in range(len(self.sizes)):
            shape = (self.slots, self.rank, self.width)
            a = weight_of(self.seed + 3 + part, *shape, dtype=self.dtype)
            made.append(spread(self._poisoned(a, part, lambda s, r: (s, slice(r, None)))))
        return made

    def b(self) -> list[Tensor]:
        """``[S, ceil(O / 16), R, 16]`` of each part."""
        made = []
        for part, size in enumerate(self.sizes):
            plain = weight_of(self.seed + 9 + part, self.slots, size, self.rank, dtype=self.dtype)
            packed = torch.stack([pack_b(b) for b in plain])
            made.append(
                spread(self._poisoned(packed, part, lambda s, r: (s, slice(None), slice(r, None))))
            )
        return made

    def _poisoned(self, tensor: Tensor, part: int, beyond: object) -> Tensor:
        ranks = self.ranks()[self.modules[part]].tolist()
        for slot, rank in enumerate(ranks):
            tensor[beyond(slot, rank)] = torch.nan  # type: ignore[operator]
        return tensor

    def weight(self) -> Tensor:
        return weight_of(self.seed + 20, self.columns, self.width, dtype=self.dtype)

    def numbers(self, *names: str) -> dict[str, float]:
        lists = {"modules": self.modules, "starts": self.starts, "sizes": list(self.sizes)}
        flat = {f"{name}.{i}": float(v) for name in names for i, v in enumerate(lists[name])}
        return {"parts": float(len(self.sizes)), **flat}


def shrink(case: Case, x: Tensor, slots: Tensor, isa: str, ranks: Tensor | None = None) -> Tensor:
    out = blank((len(x), len(case.sizes) * case.rank), torch.float32)
    given = case.ranks() if ranks is None else ranks
    tensors = [x, spread(slots), spread(given), *case.a(), out]
    run(Op("lora_shrink", tensors, case.numbers("modules")), isa)
    return out


def exact_shrink(case: Case, x: Tensor, slots: Tensor) -> Tensor:
    a = [torch.nan_to_num(each.float()) for each in case.a()]
    return lora_shrink(x.float(), slots, case.ranks(), a, case.modules)


def expand(  # noqa: PLR0917 (the operands of a command)
    case: Case,
    name: str,
    own: Sequence[Tensor | None],
    given: Sequence[Tensor],
    out: Tensor,
    isa: str,
    activation: str = "none",
) -> Tensor:
    tensors = [*own, *given, *case.b(), out]
    numbers = case.numbers("modules", "starts", "sizes")
    run(Op(name, tensors, numbers, text=activation), isa)
    return out


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]]) -> Case:
    return Case(
        dtype,
        draw(rows),
        draw(widths),
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from(RANKS)),
        draw(st.sampled_from((1, 2, 3))),
        draw(seeds),
    )


SIZES = ((1,), (16,), (17, 16), (32, 16, 16), (15, 16, 33), (48, 1), (64,), (16, 16, 16, 16))
GATED = ((16, 16), (48, 48))


@each_level
@each_dtype
@few
@given(st.data())
def test_shrink(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype, SIZES))
    x, slots = placed(data.draw, case.x()), case.slots_of()
    out = shrink(case, x, slots, isa)
    exact = exact_shrink(case, x, slots)
    for token, slot in enumerate(slots.tolist()):
        for part, module in enumerate(case.modules):
            used = int(case.ranks()[module, slot]) if slot >= 0 else 0
            row = slice(part * case.rank, part * case.rank + used)
            assert_near(out[token, row], exact[token, row], scale=4)
            rest = slice(part * case.rank + used, (part + 1) * case.rank)
            assert out[token, rest].isnan().all(), "written beyond the rank"


@each_level
@each_dtype
@few
@given(st.data())
def test_linear(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """With everything that a linear does after it, and columns that are no part's."""
    case = data.draw(cases(dtype, SIZES))
    x, slots = placed(data.draw, case.x()), case.slots_of()
    bias = spread(random(5, case.columns, dtype=dtype)) if data.draw(st.booleans()) else None
    residual = None
    if data.draw(st.booleans()):
        residual = placed(data.draw, random(6, case.count, case.columns, dtype=dtype))
    shrunk = shrink(case, x, slots, isa)
    given = [shrunk, spread(slots), spread(case.ranks())]
    own = [x, pack(case.weight()), bias, residual]
    out = placed(data.draw, blank((case.count, case.columns), dtype))
    expand(case, "lora_linear", own, given, out, isa, "silu")
    b = [torch.nan_to_num(each.float()) for each in case.b()]
    exact = lora_linear(
        x.float(),
        case.weight().float(),
        single(bias),
        single(residual),
        "silu",
        exact_shrink(case, x, slots),
        slots,
        case.ranks(),
        b,
        case.modules,
        case.starts,
        case.sizes,
    )
    assert_near(out, exact, scale=16)
    plain = blank((case.count, case.columns), dtype)
    run(Op("linear", [*own, plain], text="silu"), isa)
    without = (slots < 0).nonzero().flatten()
    assert_same_bits(out[without], plain[without])


@each_level
@each_dtype
@few
@given(st.data())
def test_gated_linear(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype, GATED))
    x, slots = placed(data.draw, case.x()), case.slots_of()
    bias = spread(random(5, case.columns, dtype=dtype)) if data.draw(st.booleans()) else None
    given = [shrink(case, x, slots, isa), spread(slots), spread(case.ranks())]
    own = [x, pack(case.weight()), bias]
    out = placed(data.draw, blank((case.count, case.columns // 2), dtype))
    expand(case, "lora_gated_linear", own, given, out, isa, "gelu")
    b = [torch.nan_to_num(each.float()) for each in case.b()]
    exact = lora_gated_linear(
        x.float(),
        case.weight().float(),
        single(bias),
        "gelu",
        exact_shrink(case, x, slots),
        slots,
        case.ranks(),
        b,
        case.modules,
        case.starts,
        case.sizes,
    )
    assert_near(out, exact, scale=32)
    plain = blank(tuple(out.shape), dtype)
    run(Op("gated_linear", [*own, plain], text="gelu"), isa)
    without = (slots < 0).nonzero().flatten()
    assert_same_bits(out[without], plain[without])


@each_level
@each_dtype
def test_a_row_is_computed_alike_alone(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit, whatever rows and adapters are computed with it."""
    case = Case(dtype, 17, 65, (32, 16), 9, 3)
    x, slots = case.x(), case.slots_of()

    def rows_of(some: slice) -> Tensor:
        shrunk = shrink(case, x[some], slots[some], isa)
        out = blank((len(x[some]), case.columns), dtype)
        given = [shrunk, slots[some].clone(), case.ranks()]
        return expand(
            case, "lora_linear", [x[some], pack(case.weight()), None, None], given, out, isa
        )

    together = rows_of(slice(None))
    for row in (0, 5, 16):
        assert_same_bits(rows_of(slice(row, row + 1)), together[row : row + 1])
    assert_same_bits(rows_of(slice(3, 12)), together[3:12])


@each_level
def test_parts_that_leave_columns_out(isa: str) -> None:
    """Of three linears on top of each other the one in the middle has no adapters."""
    case = Case(torch.float32, 5, 33, (16, 20), 4, 2)
    x, slots = case.x(), torch.tensor([0, -1, 1, 0, 0])
    weight = random(1, 70, 33, dtype=torch.float32)
    shrunk = shrink(case, x, slots, isa)
    out = blank((5, 70), torch.float32)
    numbers = {**case.numbers("modules", "sizes"), "starts.0": 0.0, "starts.1": 50.0}
    own = [x, pack(weight), None, None]
    run(
        Op("lora_linear", [*own, shrunk, slots, case.ranks(), *case.b(), out], numbers, "none"), isa
    )
    b = [torch.nan_to_num(each) for each in case.b()]
    exact = lora_linear(
        x,
        weight,
        None,
        None,
        "none",
        exact_shrink(case, x, slots),
        slots,
        case.ranks(),
        b,
        case.modules,
        [0, 50],
        case.sizes,
    )
    assert_near(out, exact, scale=16)
    assert_near(out[:, 16:50], (x @ weight.t())[:, 16:50], scale=16)


@each_level
@pytest.mark.parametrize("slot", [3, 4, 1 << 40, (1 << 63) - 1])
def test_a_slot_that_does_not_exist(isa: str, slot: int) -> None:
    """It is an error, and nothing is read or written for it."""
    case = Case(torch.float32, 4, 20, (16,), 4, 3)
    slots = torch.tensor([0, slot, -1, 1])
    with pytest.raises(IndexError, match=f"adapter slot {slot} does not exist"):
        shrink(case, case.x(), slots, isa)
    with pytest.raises(IndexError, match=f"adapter slot {slot} does not exist"):
        exact_shrink(case, case.x(), slots)
    out = blank((4, 16), torch.float32)
    given = [torch.zeros(4, 4), slots, case.ranks()]
    own = [case.x(), pack(case.weight()), None, None]
    expand(case, "lora_linear", own, given, out, isa)
    plain = blank((4, 16), torch.float32)
    run(Op("linear", [*own, plain], text="none"), isa)
    assert_same_bits(out[1:3], plain[1:3])


@each_level
@pytest.mark.parametrize("rank", [-1, -(1 << 31), 5, 17, (1 << 31) - 1])
def test_a_rank_that_cannot_be(isa: str, rank: int) -> None:
    """It is taken for the nearest that can."""
    case = Case(torch.float32, 3, 20, (16,), 4, 1)
    ranks = torch.full((3, 1), rank, dtype=torch.int32)
    slots = torch.zeros(3, dtype=torch.int64)
    out = shrink(case, case.x(), slots, isa, ranks)
    assert out.isfinite().all() if rank > 0 else out.isnan().all()


@each_level
def test_rows_of_padding_cost_nothing(isa: str) -> None:
    """Of a run of fewer tokens only their rows are computed."""
    case = Case(torch.float32, 9, 20, (16,), 4, 2)
    slots = torch.tensor([0, 1, 0, *[1 << 20] * 6])  # a slot of padding is not looked at
    out = blank((9, 4), torch.float32)
    tensors = [case.x(), slots, case.ranks(), *case.a(), out]
    run(Op("lora_shrink", tensors, case.numbers("modules"), by_token=True), isa, tokens=3)
    assert out[0].isfinite().all()
    assert out[3:].isnan().all()


@each_level
@each_dtype
def test_results_do_not_depend_on_threads(isa: str, dtype: torch.dtype) -> None:
    case = Case(dtype, 40, 257, (160, 48, 64), 33, 3)
    x, slots = case.x(), case.slots_of(0)
    results = []
    for threads in (1, 2, 3):
        pool = _native.Pool([CPUS[i % len(CPUS)] for i in range(threads)])
        shrunk = blank((40, 99), torch.float32)
        given = [slots, case.ranks()]
        shrink = [x, *given, *case.a(), shrunk]
        run(Op("lora_shrink", shrink, case.numbers("modules")), isa, pool)
        out = blank((40, case.columns), dtype)
        expand = [x, pack(case.weight()), None, None, shrunk, *given, *case.b(), out]
        numbers = case.numbers("modules", "starts", "sizes")
        run(Op("lora_linear", expand, numbers, text="none"), isa, pool)
        results.append(out)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_packed_b_is_read_back() -> None:
    b = random(1, 35, 3, dtype=torch.float32)
    packed = pack_b(b)
    assert packed.shape == (3, 3, LANES)
    assert torch.equal(packed.transpose(1, 2).reshape(-1, 3)[:35], b)
    assert not packed[2, :, 3:].any()
