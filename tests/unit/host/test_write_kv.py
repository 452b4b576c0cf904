# SPDX-License-Identifier: Apache-2.0
"""`rbln::write_kv` against a loop that stores one row at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rbln_host.ops import PADDING_SLOT, write_kv

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_rows(slots: list[int], heads: int, size: int, dtype: torch.dtype) -> Tensor:
    rows = torch.randn(len(slots), heads, size).to(dtype)
    rows[[slot < 0 for slot in slots]] = NAN
    return rows


def stored_one_by_one(keys: Tensor, values: Tensor, pool: Tensor, slots: list[int]) -> Tensor:
    expected = pool.clone()
    size = keys.shape[-1]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for head in range(keys.shape[1]):
                place = expected[slot // pool.shape[2], head, slot % pool.shape[2]]
                place[:size] = keys[row, head]
                place[size:] = values[row, head]
    return expected


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100)
@given(
    heads=st.integers(1, 3),
    block_size=st.integers(1, 5),
    slots=st.lists(st.integers(5, 24), unique=True, max_size=6),
    padding=st.lists(st.integers(0, 6), max_size=3),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    index_type=st.sampled_from((torch.int64, torch.int32)),
)
def test_stores_real_rows_and_nothing_else(
    *,
    heads: int,
    block_size: int,
    slots: list[int],
    padding: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    index_type: torch.dtype,
) -> None:
    for place in padding:
        slots.insert(min(place, len(slots)), PADDING_SLOT)
    keys, values = (random_rows(slots, heads, 4, dtypes[0]) for _ in range(2))
    pool = torch.randn(25, heads, block_size, 8).to(dtypes[1])
    pool[0] = NAN
    expected = stored_one_by_one(keys, values, pool, slots)
    write_kv(keys, values, pool, torch.tensor(slots, dtype=index_type))
    assert_same(pool, expected)
    assert pool[0].isnan().all()


def test_writes_through_views_of_the_pool() -> None:
    memory = torch.full((2, 5, 4, 6, 16), NAN)
    layer = memory[1, ::2].transpose(1, 2)
    assert not layer.is_contiguous()
    slots = [2, PADDING_SLOT, 9, 11]
    keys, values = (random_rows(slots, 6, 8, torch.float32) for _ in range(2))
    expected = stored_one_by_one(keys, values, layer, slots)
    write_kv(keys, values, layer, torch.tensor(slots))
    assert_same(layer, expected)
    assert memory[0].isnan().all()
    assert memory[1, 1::2].isnan().all()


def test_rows_may_be_slices_of_a_fused_projection() -> None:
    fused = torch.randn(3, 2, 24)
    keys, values = fused[..., 8:16], fused[..., 16:]
    pool = torch.zeros(3, 2, 4, 16)
    write_kv(keys, values, pool, torch.tensor([4, 5, 11]))
    assert torch.equal(pool[2, :, 3], torch.cat((keys[2], values[2]), dim=-1))


@pytest.mark.parametrize("slot", [12, 1000])
def test_a_slot_outside_the_pool_is_refused(slot: int) -> None:
    pool = torch.zeros(3, 1, 4, 8)
    with pytest.raises(IndexError):
        write_kv(torch.ones(1, 1, 4), torch.ones(1, 1, 4), pool, torch.tensor([slot]))
    assert not pool.any()
