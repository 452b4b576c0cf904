# SPDX-License-Identifier: Apache-2.0
"""The memory of adapters in programs: inputs that are bound once and written in place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_vllm.toolchain import RANKS_INPUT, Adapters, a_input, b_input, pack_b


@dataclass(frozen=True)
class LowRank:
    """An adapter's part in one module: ``a_RK`` ``[r, K]`` and ``b_OR`` ``[O, r]``.

    The module's output gains ``scale * b_OR @ a_RK @ input``.
    """

    a_RK: Tensor
    b_OR: Tensor
    scale: float = 1.0

    def __post_init__(self) -> None:
        a, b = tuple(self.a_RK.shape), tuple(self.b_OR.shape)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise ValueError(f"A {a} and B {b} have no common rank")

    @property
    def rank(self) -> int:
        return int(self.a_RK.shape[0])


class AdapterSlots:
    """Inputs of programs, by name, that hold up to ``slots`` adapters.

    Numbers beyond an adapter's rank are never read. Memory is taken when it is first written.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self.inputs: dict[str, Tensor] = {
            name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in adapters.input_specs()
        }

    def fill(self, slot: int, parts: Mapping[str, LowRank]) -> None:
        """Put an adapter into a slot, in place of what was there.

        ``parts`` by module; in others it changes nothing. The scale becomes part of B.
        """
        self.clear(slot)
        ranks_MS = self.inputs[RANKS_INPUT]
        for name, part in parts.items():
            self.inputs[a_input(name)][slot, : part.rank] = part.a_RK
            scaled_OR = (part.b_OR.float() * part.scale).to(self.adapters.dtype)
            self.inputs[b_input(name)][slot, :, : part.rank] = pack_b(scaled_OR)
            ranks_MS[self.adapters.places[name], slot] = part.rank

    def clear(self, slot: int) -> None:
        """Leave a slot without an adapter: who names it is computed by the base model."""
        self.inputs[RANKS_INPUT][:, slot] = 0


def slot_bytes(adapters: Adapters) -> int:
    """Bytes of all slots when all are full."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for _, spec in adapters.input_specs())
