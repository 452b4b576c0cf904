# SPDX-License-Identifier: Apache-2.0
"""Which adapters are in memory and which of those in the programs' slots.

vLLM's managers keep both as caches of the least recently used. Theirs wrap the layers of a model;
here there is none, and an adapter that becomes active is written into a slot instead.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from vllm.config.lora import LoRAConfig
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from rbln_vllm.lora.checkpoint import NotCompiledInError, load_adapter, parts_of, stored_adapter
from rbln_vllm.lora.fit import AdapterError
from rbln_vllm.lora.slots import AdapterSlots
from rbln_vllm.lora.stored import StoredAdapters
from rbln_vllm.models.select import implementation_of
from rbln_vllm.toolchain import NO_ADAPTER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.utils import WeightsMapper


class SlotManager(LRUCacheLoRAModelManager):
    """``max_cpu_loras`` adapters in memory, ``max_loras`` of them in slots."""

    def __init__(self, config: LoRAConfig, slots: AdapterSlots) -> None:
        # Not upstream's: it looks for the layers of a model.
        self.lora_config, self._slots = config, slots
        self.modules: dict[str, Any] = {}
        self.lora_index_to_id: list[int | None] = [None] * self.lora_slots
        self._registered_adapters: AdapterLRUCache[LoRAModel] = AdapterLRUCache(
            self.capacity, self.deactivate_adapter
        )
        self._active_adapters: AdapterLRUCache[None] = AdapterLRUCache(
            self.lora_slots, self._deactivate_adapter
        )

    def activate_adapter(self, lora_id: int) -> bool:
        """Put an adapter into a slot, if it is in none; the oldest makes room."""
        is_new = bool(super().activate_adapter(lora_id))
        if is_new:
            adapter = self._registered_adapters[lora_id]
            self._slots.fill(self.lora_index_to_id.index(lora_id), parts_of(adapter))
        return is_new

    def _deactivate_adapter(self, lora_id: int) -> None:
        if lora_id in self.lora_index_to_id:
            self._slots.clear(self.lora_index_to_id.index(lora_id))
        super()._deactivate_adapter(lora_id)

    def _add_adapter(self, lora: LoRAModel) -> None:
        self._registered_adapters[lora.id] = lora

    def set_adapter_mapping(self, mapping: Any) -> None:
        """Tokens name their slots in an input of the program."""

    def remove_all_adapters(self) -> None:
        self._registered_adapters.clear()
        self._active_adapters.clear()


class ProgramLoRAManager(LRUCacheWorkerLoRAManager):
    """The worker's adapters: loads them, and says which slot each request's is in."""

    _adapter_manager: SlotManager

    def __init__(
        self,
        vllm_config: "VllmConfig",
        device: torch.device,
        slots: AdapterSlots,
        stored: StoredAdapters | None = None,
    ) -> None:
        super().__init__(vllm_config, device, {})
        self._slots, self._mapper, self._stored = slots, _weights_mapper(vllm_config), stored
        self._names: dict[int, str] = {}  # of adapters that were loaded under an id
        self._adapter_manager = SlotManager(self.lora_config, slots)

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        if self._stored is None:
            return load_adapter(lora_request, self.lora_config, self._slots.adapters, self._mapper)
        if lora_request.lora_name in self._stored.ids:
            return stored_adapter(lora_request, self._stored)
        try:
            return load_adapter(lora_request, self.lora_config, self._slots.adapters)
        except LoRAAdapterNotFoundError as error:
            raise NotCompiledInError(lora_request, self._stored) from error

    def load_stored(self) -> None:
        """Load what a compiled directory holds, under the ids that it has there.

        AdapterError for one that does not fit the model.
        """
        if self._stored is None:
            return
        for name, number in self._stored.ids.items():
            self.add_adapter(LoRARequest(name, number, str(self._stored.artifact.directory)))

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is there; raises AdapterError or LoRAAdapterNotFoundError."""
        number, name = lora_request.lora_int_id, lora_request.lora_name
        if lora_request.load_inplace and self._stored is not None and name in self._stored.ids:
            raise AdapterError(
                f"adapter {name!r} is compiled in and cannot be replaced: load the other one under "
                "a name of its own"
            )
        # Ids of compiled-in adapters are the directory's, those of a server its own: the adapter
        # that is asked for is the one of the name.
        if self._names.get(number, name) != name:
            lora_request = replace(lora_request, load_inplace=True)
        added = bool(super().add_adapter(lora_request))
        self._names[number] = name
        return added

    def _apply_adapters(self, lora_requests: Iterable[LoRARequest]) -> None:
        """Have these in slots. What is in memory stays: only ``add_lora`` loads in place."""
        try:
            for request in lora_requests:
                if self._is_missing(request):
                    self.add_adapter(request)
                else:
                    self._adapter_manager.activate_adapter(request.lora_int_id)
        except AdapterError:
            raise
        except RuntimeError as error:  # of the caches
            raise AdapterError(
                f"no room for another adapter ({error}): unpin one, or raise --max-loras and "
                "--max-cpu-loras"
            ) from error

    def _is_missing(self, request: LoRARequest) -> bool:
        number = request.lora_int_id
        is_there = self._adapter_manager.get_adapter(number) is not None
        return not is_there or self._names.get(number) != request.lora_name

    def activate(self, requests: Iterable[LoRARequest]) -> dict[int, str]:
        """Have these adapters in slots; ids of those that cannot be loaded, and why."""
        failures = {}
        for request in requests:
            try:
                self._apply_adapters([request])
            except (AdapterError, LoRAAdapterNotFoundError) as error:
                failures[request.lora_int_id] = str(error)
        return failures

    def slots_of(self, lora_ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """The slot of each id; ``NO_ADAPTER`` for id 0 and those that are in none."""
        slots = {adapter: s for s, adapter in enumerate(self._adapter_manager.lora_index_to_id)}
        return np.array([slots.get(adapter, NO_ADAPTER) for adapter in lora_ids.tolist()], np.int32)


def _weights_mapper(vllm_config: "VllmConfig") -> "WeightsMapper | None":
    """How the model's own modules are called otherwise than Hugging Face's; None if not at all."""
    if implementation_of(vllm_config) == "transformers":
        return None
    from vllm.model_executor.model_loader.utils import get_model_architecture

    model_class, _ = get_model_architecture(vllm_config.model_config)
    mapper = getattr(model_class, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
