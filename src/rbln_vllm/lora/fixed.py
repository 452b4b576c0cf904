# SPDX-License-Identifier: Apache-2.0
"""Adapters that were compiled in: they are in their slots from the start and stay there."""

from typing import TYPE_CHECKING, NoReturn

import torch
from vllm.lora.request import LoRARequest

from rbln_vllm.lora.checkpoint import AdapterError
from rbln_vllm.lora.config import LoraConfig
from rbln_vllm.lora.manager import ProgramLoRAManager
from rbln_vllm.lora.slots import AdapterSlots

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UnknownAdapterError(AdapterError, RuntimeError):
    """An id that was not compiled in."""


class FixedLoRAManager(ProgramLoRAManager):
    """The adapters of a compiled model, by the ids of its configuration.

    Needs a slot for each. Raises what loading an adapter does.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        device: torch.device,
        slots: AdapterSlots,
        compiled: LoraConfig,
    ) -> None:
        super().__init__(vllm_config, device, slots)
        self._compiled = compiled
        for adapter in compiled.adapters:
            request = LoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
            super().add_adapter(request)

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Names a compiled adapter; False, since it is there. RuntimeError for any other id."""
        if lora_request.lora_int_id in self._compiled.ids:
            return False
        raise UnknownAdapterError(
            f"Invalid `lora_int_id` {lora_request.lora_int_id}: this model was compiled with the "
            f"adapters {sorted(self._compiled.ids)}. Name one of them, or compile the model with "
            "yours in lora_config"
        )

    def remove_adapter(self, adapter_id: int) -> NoReturn:
        raise RuntimeError(f"adapter {adapter_id} is compiled in and cannot be removed")

    def pin_adapter(self, adapter_id: int) -> NoReturn:
        raise RuntimeError(f"adapter {adapter_id} is compiled in; there is nothing to pin")
