# SPDX-License-Identifier: Apache-2.0
"""Which linears of a model take low-rank adapters, and the program inputs that hold them.

An adapter belongs to a *module* of the model, by the name that adapter files use. Its matrices are
inputs of every program that computes the module: ``lora_a.<module>`` ``[S, R, K]`` and
``lora_b.<module>`` ``[S, ceil(O / 16), R, 16]``. ``lora_ranks`` ``[M, S]`` has the rank of each
slot's adapter in each module, and ``lora_slots`` ``[N]`` the slot of each token. They are bound
once and written in place, so loading an adapter compiles nothing. See ``rbln_host.ops.lora``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rbln_host.compiler.graph import TensorSpec
from rbln_host.ops.lora import LANES

SLOTS_INPUT = "lora_slots"
RANKS_INPUT = "lora_ranks"


def a_input(module: str) -> str:
    """Name of the input that holds a module's ``A``."""
    return f"lora_a.{module}"


def b_input(module: str) -> str:
    """Name of the input that holds a module's ``B``."""
    return f"lora_b.{module}"


@dataclass(frozen=True)
class AdaptedModule:
    """A linear of the model: ``weight`` is the name of the weight it multiplies with.

    Several modules may share a weight, on top of each other (query, key and value); together they
    are all of its output features. Only one that ``is_adapted`` may have adapters.
    """

    name: str
    weight: str
    in_features: int
    out_features: int
    is_adapted: bool = True

    def __post_init__(self) -> None:
        if min(self.in_features, self.out_features) < 1:
            raise ValueError(f"{self.name}: a linear needs features")

    def input_specs(self, slots: int, rank: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Its two inputs for ``slots`` adapters of at most ``rank``."""
        groups = -(-self.out_features // LANES)
        return {
            a_input(self.name): TensorSpec((slots, rank, self.in_features), dtype),
            b_input(self.name): TensorSpec((slots, groups, rank, LANES), dtype),
        }


@dataclass(frozen=True)
class Adapters:
    """The adapters that programs are compiled for: as many ``slots``, each padded to ``rank``.

    ``modules`` are all linears of the model; ValueError when no one of them is adapted.
    """

    slots: int
    rank: int
    dtype: torch.dtype
    modules: tuple[AdaptedModule, ...]

    def __post_init__(self) -> None:
        if min(self.slots, self.rank) < 1:
            raise ValueError(f"adapters need a slot and a rank: {self.slots}, {self.rank}")
        names = [module.name for module in self.modules]
        if len(set(names)) != len(names):
            raise ValueError("two modules have one name")
        if not self.adapted:
            raise ValueError("no linear of the model is adapted")

    @cached_property
    def adapted(self) -> tuple[AdaptedModule, ...]:
        """The modules that may have adapters."""
        return tuple(module for module in self.modules if module.is_adapted)

    @cached_property
    def by_weight(self) -> Mapping[str, tuple[AdaptedModule, ...]]:
        """Weight -> the modules it consists of, in the order of its rows."""
        found: dict[str, tuple[AdaptedModule, ...]] = {}
        for module in self.modules:
            found[module.weight] = (*found.get(module.weight, ()), module)
        return found

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Adapted module -> its row of ``lora_ranks``."""
        return {module.name: place for place, module in enumerate(self.adapted)}

    def renamed(self, names: Mapping[str, str]) -> "Adapters":
        """The same for weights of other names."""
        modules = (replace(m, weight=names.get(m.weight, m.weight)) for m in self.modules)
        return replace(self, modules=tuple(modules))

    def input_specs(self) -> Iterator[tuple[str, TensorSpec]]:
        """Every input but the slots of the tokens."""
        yield RANKS_INPUT, TensorSpec((len(self.adapted), self.slots), torch.int32)
        for module in self.adapted:
            yield from module.input_specs(self.slots, self.rank, self.dtype).items()
