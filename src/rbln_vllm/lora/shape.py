# SPDX-License-Identifier: Apache-2.0
"""What programs are compiled for of adapters: how many, of what rank, in which linears."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rbln_vllm.toolchain import AdaptedModule, Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class AdapterShape:
    """``slots`` adapters in one batch (``--max-loras``), each of at most ``rank``.

    ``targets`` are suffixes of module names (``--lora-target-modules``); None adapts every linear.
    """

    slots: int
    rank: int
    dtype: torch.dtype
    targets: tuple[str, ...] | None = None

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "AdapterShape | None":
        """None without ``--enable-lora``."""
        lora = vllm_config.lora_config
        if lora is None:
            return None
        targets = lora.target_modules
        return cls(
            slots=lora.max_loras,
            rank=lora.max_lora_rank,
            dtype=vllm_config.model_config.dtype,
            targets=None if targets is None else tuple(sorted(targets)),
        )

    @property
    def key(self) -> str:
        """For cache keys: programs of another shape are others."""
        dtype = str(self.dtype).removeprefix("torch.")
        targets = "all" if self.targets is None else ",".join(self.targets)
        return f"{self.slots} slots, rank {self.rank}, {dtype}, {targets}"

    def adapters(self, modules: Iterable[AdaptedModule]) -> Adapters:
        """The adapters of a model with these linears; ValueError when none is a target."""
        marked = tuple(replace(m, is_adapted=self._is_target(m)) for m in modules)
        if not any(module.is_adapted for module in marked):
            names = sorted({module.name.rsplit(".", 1)[-1] for module in marked})
            raise ValueError(
                f"--lora-target-modules {', '.join(self.targets or ())} names no linear of this "
                f"model; it has {', '.join(names) or 'none that can be adapted'}"
            )
        return Adapters(self.slots, self.rank, self.dtype, marked)

    def _is_target(self, module: AdaptedModule) -> bool:
        """By its own name, or by that of the layer in which it lies with others."""
        if self.targets is None:
            return True
        names = (f".{module.name}", f".{module.weight.removesuffix('.weight')}")
        return any(name.endswith(f".{target}") for target in self.targets for name in names)


def modules_to_json(adapters: Adapters | None) -> list[dict[str, Any]]:
    """For the artifact's manifest: a warm start knows the linears without building the model."""
    modules = () if adapters is None else adapters.modules
    return [
        {
            "name": module.name,
            "weight": module.weight,
            "in_features": module.in_features,
            "out_features": module.out_features,
        }
        for module in modules
    ]


def modules_from_json(items: Iterable[dict[str, Any]]) -> tuple[AdaptedModule, ...]:
    """The inverse; TypeError or ValueError when the manifest holds something else."""
    return tuple(AdaptedModule(**item) for item in items)
