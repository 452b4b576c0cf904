# SPDX-License-Identifier: Apache-2.0
"""Which compiled-in adapter each sequence of a batch is computed with, without an engine."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from rbln_vllm.lora.config import BASE_MODEL, BASE_NAME
from rbln_vllm.lora.slots import AdapterSlots
from rbln_vllm.lora.stored import StoredAdapters
from rbln_vllm.toolchain import NO_ADAPTER
from rbln_vllm.worker.inputs import Integers

AdapterNames = str | None | Sequence[str | None]


class AdapterChoice:
    """Adapters by name or id, one for all sequences or one for each; at first the base model.

    ``stored`` None is a model without adapters: nothing but the base model can be chosen.
    """

    def __init__(self, stored: StoredAdapters | None) -> None:
        self._ids: Mapping[str, int] = {} if stored is None else stored.ids
        self._chosen: int | tuple[int, ...] = BASE_MODEL

    def choose(self, names: AdapterNames) -> None:
        """By name; None or ``"base"`` is the base model. ValueError for an unknown one."""
        if names is None or isinstance(names, str):
            self._chosen = self._id_of(names)
        else:
            self._chosen = tuple(self._id_of(name) for name in names)

    def choose_ids(self, lora_int_ids: Tensor | Sequence[int]) -> None:
        """One id for each sequence; 0 is the base model. RuntimeError for an unknown one."""
        ids = [int(number) for number in lora_int_ids]
        unknown = sorted({*ids} - {BASE_MODEL, *self._ids.values()})
        if unknown:
            raise RuntimeError(f"Invalid `lora_int_id` {unknown}: {self._known()}")
        self._chosen = tuple(ids)

    def slots_B(self, rows: int) -> Integers | None:  # noqa: N802
        """The slot of each of ``rows`` sequences, which is its id less one; None without adapters.

        ValueError for another number of sequences than adapters were chosen for.
        """
        if isinstance(self._chosen, int):
            ids = (self._chosen,) * rows
        elif len(self._chosen) != rows:
            raise ValueError(
                f"adapters are chosen for {len(self._chosen)} sequences, and these are {rows}: "
                "call set_adapter with one for each, or with one for all"
            )
        else:
            ids = self._chosen
        if not any(ids):
            return None
        return np.array([NO_ADAPTER if not n else n - 1 for n in ids], dtype=np.int32)

    def _id_of(self, name: str | None) -> int:
        if name is None or name == BASE_NAME:
            return BASE_MODEL
        if name not in self._ids:
            raise ValueError(f"there is no adapter {name!r}: {self._known()}")
        return self._ids[name]

    def _known(self) -> str:
        if not self._ids:
            return "this model was compiled without adapters (lora_config)"
        known = ", ".join(f"{name} ({number})" for name, number in self._ids.items())
        return f"the model was compiled with {known}; None (0) is the base model"


def filled_slots(stored: StoredAdapters) -> AdapterSlots:
    """Every adapter in the slot of its id. AdapterError for one that does not fit."""
    slots = AdapterSlots(stored.adapters)
    for name, number in stored.ids.items():
        slots.fill(number - 1, stored.parts(name))
    return slots
