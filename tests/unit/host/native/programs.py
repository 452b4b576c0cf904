# SPDX-License-Identifier: Apache-2.0
"""Native commands on torch tensors, with everything around their outputs watched."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rbln_host import _native
from rbln_host.compiler.pack import GROUP, pack
from tests.unit.host.native.commands import OUTPUTS

LEVELS: tuple[str, ...] = tuple(_native.isa_levels())
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
CPUS = sorted(os.sched_getaffinity(0))
GUARD = 128
"""Elements before and after each tensor that no command may touch."""

ALL = (1 << 63) - 1
"""As many tokens as there are."""

RELATIVE = {torch.float32: 2e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}
"""One rounding to the dtype of a value computed in fp32."""
ABSOLUTE = 2e-5
"""Of sums of terms of about 1, in fp32; times a test's own scale."""


@dataclass(frozen=True)
class Op:
    """One command: its operator, tensors (None for an absent one), numbers and text."""

    name: str
    tensors: Sequence[Tensor | None]
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    by_token: bool = False

    def outputs(self) -> list[Tensor]:
        found = [self.tensors[i] for i in OUTPUTS[self.name]]
        return [tensor for tensor in found if tensor is not None]


class Loaded:
    """A program whose bases are the storages of its tensors."""

    def __init__(self, ops: Sequence[Op], isa: str) -> None:
        self.storages: dict[int, Tensor] = {}
        commands = [
            _native.Command(
                op.name,
                [None if tensor is None else self._operand(tensor) for tensor in op.tensors],
                dict(op.numbers),
                op.text,
                op.by_token,
            )
            for op in ops
        ]
        sizes = [whole.nbytes for whole in self.storages.values()]
        self.program = _native.Program(commands, sizes, isa)
        for base, whole in enumerate(self.storages.values()):
            self.program.bind(base, whole.data_ptr(), whole.nbytes)

    def run(self, pool: _native.Pool, tokens: int = ALL) -> None:
        self.program.run(pool, tokens)

    def _operand(self, tensor: Tensor) -> _native.Tensor:
        whole = whole_storage(tensor)
        self.storages.setdefault(whole.data_ptr(), whole)
        return _native.Tensor(
            list(self.storages).index(whole.data_ptr()),
            int(tensor.storage_offset()) * tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            list(tensor.stride()),
        )


def run(op: Op, isa: str, pool: _native.Pool | None = None, tokens: int = ALL) -> None:
    """Run one command, by default on one thread.

    Fails when a byte changes that belongs to no element of its outputs."""
    pool = pool or _native.Pool([CPUS[0]])
    loaded = Loaded([op], isa)
    before = {pointer: whole.clone() for pointer, whole in loaded.storages.items()}
    try:
        loaded.run(pool, tokens)
    finally:
        for pointer, whole in loaded.storages.items():
            outputs = [t for t in op.outputs() if whole_storage(t).data_ptr() == pointer]
            outside = ~_elements(whole, outputs)
            changed = torch.nonzero((whole != before[pointer]) & outside)
            assert not len(changed), f"{op.name} changed bytes {changed[:4].flatten().tolist()}"


def whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is part of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _elements(whole: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Which bytes of a storage belong to elements of the tensors."""
    mask = torch.zeros(whole.shape, dtype=torch.bool)
    for tensor in tensors:
        size = tensor.element_size()
        cells = mask.view(-1, size).as_strided(
            (*tensor.shape, size),
            (*(stride * size for stride in tensor.stride()), 1),
            tensor.storage_offset() * size,
        )
        cells[...] = True
    return mask


def poison(count: int, dtype: torch.dtype) -> Tensor:
    """NaN, or integers that are no index of anything."""
    if dtype.is_floating_point:
        return torch.full((count,), torch.nan, dtype=dtype)
    return torch.full((count,), 0x5A5A5A5A, dtype=dtype)


def spread(tensor: Tensor, gaps: Sequence[int] = (), order: Sequence[int] = ()) -> Tensor:
    """A copy with other strides, in memory that is poisoned before, after and between.

    ``order`` names the axes from the innermost out (default: row-major), ``gaps`` how many
    elements are left free after each of them.
    """
    axes = list(order) or list(range(tensor.dim()))[::-1]
    strides = [0] * tensor.dim()
    step = 1
    for axis, gap in zip(axes, [*gaps, *[0] * tensor.dim()], strict=False):
        strides[axis] = step
        step = step * max(1, tensor.shape[axis]) + gap
    memory = poison(step + 2 * GUARD, tensor.dtype)
    placed = memory.as_strided(tensor.shape, strides, GUARD)
    return placed.copy_(tensor)


def blank(
    shape: Sequence[int], dtype: torch.dtype, gaps: Sequence[int] = (), order: Sequence[int] = ()
) -> Tensor:
    """An output that nothing was written to yet."""
    values = poison(1, dtype).expand(tuple(shape))
    return spread(values, gaps, order)


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normally distributed values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def weight_of(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random, so scaled that products with normal rows are about 1."""
    return (random(seed, *shape, dtype=torch.float32) / math.sqrt(shape[-1])).to(dtype)


def poisoned_pack(weight: Tensor) -> Tensor:
    """``[O, K]`` or ``[E, O, K]``, packed; with NaN where zeros fill up the last group."""
    packed = pack(weight)
    *experts, columns, _ = weight.shape
    used = columns % GROUP
    if used:
        last = packed.select(len(experts), -1)
        last.narrow(len(experts) + 1, used, GROUP - used).fill_(torch.nan)
    return spread(packed)


def single(tensor: Tensor | None) -> Tensor | None:
    """The tensor in float32, for a reference that rounds nothing."""
    return None if tensor is None else tensor.float()


def assert_near(output: Tensor, exact: Tensor, scale: float = 1.0) -> None:
    """Equal but for one rounding and fp32's error in sums of terms of about ``scale``."""
    torch.testing.assert_close(
        output.float(),
        exact.float(),
        rtol=RELATIVE[output.dtype],
        atol=ABSOLUTE * scale,
        equal_nan=True,
    )


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """Equal bit for bit."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    as_bytes = [t.flatten().contiguous().view(torch.uint8) for t in (left, right)]
    assert torch.equal(*as_bytes), f"{int((as_bytes[0] != as_bytes[1]).sum())} bytes differ"
