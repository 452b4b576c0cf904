# SPDX-License-Identifier: Apache-2.0
"""Indices that are out of range: an error, no byte outside touched, and then all is well."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rbln_host import _native
from rbln_host.compiler.pack import pack
from tests.unit.host.native.programs import (
    CPUS,
    INDEX_DTYPES,
    Loaded,
    Op,
    assert_same_bits,
    blank,
    random,
    run,
    spread,
)
from tests.unit.host.native.strategies import each_dtype, each_level

TOKENS, BLOCKS, BLOCK_SIZE, ROWS = 5, 3, 4, 9
INT64 = (1 << 40, -(1 << 40), (1 << 63) - 1, -(1 << 63))


def vary(indices: Tensor, value: int, at: int) -> Tensor:
    """With one index out of range."""
    changed = indices.clone()
    changed[at] = value
    return spread(changed)


def heads(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return random(seed, TOKENS, count, 16, dtype=dtype)


def embedding(ids: Tensor, dtype: torch.dtype) -> Op:
    table = random(1, ROWS, 20, dtype=dtype)
    numbers = {"packed": 0, "rows": ROWS, "width": 20}
    return Op("embedding", [table, ids, blank((TOKENS, 20), dtype)], numbers)


def packed_embedding(ids: Tensor, dtype: torch.dtype) -> Op:
    table = pack(random(1, ROWS, 20, dtype=dtype))
    numbers = {"packed": 1, "rows": ROWS, "width": 20}
    return Op("embedding", [table, ids, blank((TOKENS, 20), dtype)], numbers)


def rotary(positions: Tensor, dtype: torch.dtype) -> Op:
    table = random(1, ROWS, 16, dtype=dtype)
    return Op("rotary", [heads(2, 3, dtype), positions, table, blank((TOKENS, 3, 16), dtype)], NEOX)


def pool(dtype: torch.dtype) -> Tensor:
    return blank((BLOCKS, 2, BLOCK_SIZE, 32), dtype)


def write_kv(slots: Tensor, dtype: torch.dtype) -> Op:
    return Op("write_kv", [heads(1, 2, dtype), heads(2, 2, dtype), pool(dtype), slots])


def write_at_slots(slots: Tensor, dtype: torch.dtype) -> Op:
    return rotary_write(torch.arange(TOKENS), slots, dtype)


def write_at_positions(positions: Tensor, dtype: torch.dtype) -> Op:
    return rotary_write(positions, torch.arange(TOKENS), dtype)


def rotary_write(positions: Tensor, slots: Tensor, dtype: torch.dtype) -> Op:
    query, key, value = heads(1, 4, dtype), heads(2, 2, dtype), heads(3, 2, dtype)
    table, out = random(4, ROWS, 16, dtype=dtype), blank((TOKENS, 4, 16), dtype)
    tensors = [query, key, value, positions, table, pool(dtype), slots, out]
    return Op("rotary_write_kv", tensors, NEOX)


NEOX = {"neox": 1.0}
CASES: dict[str, tuple[Callable[[Tensor, torch.dtype], Op], str, tuple[int, ...]]] = {
    "embedding": (embedding, "id", (-1, ROWS, ROWS + 1, 1 << 30, -(1 << 31))),
    "packed embedding": (packed_embedding, "id", (-1, ROWS, 16, 1 << 30, -(1 << 31))),
    "rotary": (rotary, "position", (-1, ROWS, 1 << 30, -(1 << 31))),
    "rotary_write_kv, position": (write_at_positions, "position", (-1, ROWS, 1 << 30)),
    "rotary_write_kv, slot": (write_at_slots, "slot", (BLOCKS * BLOCK_SIZE, 1 << 30)),
    "write_kv": (write_kv, "slot", (BLOCKS * BLOCK_SIZE, (1 << 31) - 1)),
}


@each_level
@each_dtype
@pytest.mark.parametrize("case", CASES)
def test_an_index_out_of_range(isa: str, dtype: torch.dtype, case: str) -> None:
    make, name, values = CASES[case]
    for index_dtype in INDEX_DTYPES:
        good = torch.arange(TOKENS, dtype=index_dtype)
        wide = INT64 if index_dtype == torch.int64 else ()
        for at, value in enumerate((*values, *wide)):
            if name == "slot" and value < 0:
                continue
            with pytest.raises(IndexError, match=f"^{name} {value} "):
                run(make(vary(good, value, at % TOKENS), dtype), isa)
        run(make(good, dtype), isa)


@each_level
def test_the_other_rows_are_computed(isa: str) -> None:
    op = embedding(torch.tensor([3, 4, ROWS, 8, 0]), torch.float32)
    with pytest.raises(IndexError, match=f"id {ROWS} is outside its table"):
        run(op, isa)
    table, ids, out = op.tensors
    assert table is not None
    assert ids is not None
    assert out is not None
    assert out[2].isnan().all()
    for row in (0, 1, 3, 4):
        assert_same_bits(out[row], table[ids[row]])


def test_a_fault_is_forgotten() -> None:
    """The same program, on the same pool, once its data is right. Also by other programs."""
    ids = torch.tensor([0, 1, 2, 3, -1])
    op = embedding(ids, torch.float32)
    program, threads = Loaded([op], "portable"), _native.Pool([CPUS[0]] * 2)
    copy = Loaded([Op("copy", [torch.ones(3), torch.empty(3)])], "portable")
    for _ in range(3):
        ids[4] = -1
        with pytest.raises(IndexError):
            program.run(threads)
        copy.run(threads)
        ids[4] = 4
        program.run(threads)
        assert_same_bits(op.outputs()[0], op.tensors[0][ids])  # type: ignore[index]


def test_later_commands_run_and_the_first_fault_is_told() -> None:
    first = embedding(torch.tensor([0, 1, 2, 3, 77]), torch.float32)
    second = embedding(torch.tensor([0, 1, 2, 3, 88]), torch.float32)
    target = torch.zeros(3)
    copy = Op("copy", [torch.ones(3), target])
    with pytest.raises(IndexError, match="id 77 "):
        Loaded([first, second, copy], "portable").run(_native.Pool([CPUS[0]] * 3))
    assert target.tolist() == [1, 1, 1]
