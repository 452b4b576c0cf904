# SPDX-License-Identifier: Apache-2.0
"""Memory of programs as torch tensors: the shared arena, and views that follow their memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rbln_host.compiler.plan import Plan
from rbln_host.runtime.native.operands import Base, Operand, operand_of


class Arena:
    """Scratch memory that all programs of an executable share, since one runs at a time.

    It grows when a program needs more; then ``memory`` is another tensor.
    """

    def __init__(self) -> None:
        self.memory = new_memory(0)

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.memory.nbytes:
            self.memory = new_memory(nbytes)


class TorchViews:
    """Values as torch tensors over the memory they lie in, for what torch runs and returns.

    ``tensors`` holds them by the number that :meth:`number` gave; each is replaced when its memory
    moves.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._operands: list[Operand] = []
        self._numbers: dict[str, int] = {}
        self.tensors: list[Tensor] = []

    def number(self, value: str) -> int:
        """Where ``tensors`` holds this value once its memory has been given."""
        if value not in self._numbers:
            self._numbers[value] = len(self._operands)
            self._operands.append(operand_of(self._plan, value))
            self.tensors.append(torch.empty(0))
        return self._numbers[value]

    @property
    def bases(self) -> Iterable[Base]:
        """Memory that is needed."""
        return {operand.base for operand in self._operands}

    def move(self, base: Base, memory: Tensor) -> None:
        """Look at what lies in ``base`` where ``memory`` starts."""
        for number, operand in enumerate(self._operands):
            if operand.base == base:
                self.tensors[number] = view_of(operand, memory)


def view_of(operand: Operand, memory: Tensor) -> Tensor:
    """The operand as a tensor over the memory of its base."""
    start = memory.storage_offset() * memory.itemsize + operand.offset
    return torch.empty(0, dtype=operand.dtype).set_(
        memory.untyped_storage(), start // operand.dtype.itemsize, operand.shape, operand.strides
    )


def new_memory(nbytes: int) -> Tensor:
    """Uninitialised bytes; torch aligns them to cache lines. MemoryError when there are none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(
            f"programs need {nbytes / (1 << 20):.0f} MiB for their values, which this machine has "
            "not: lower --max-num-batched-tokens, or give it more memory"
        ) from error
