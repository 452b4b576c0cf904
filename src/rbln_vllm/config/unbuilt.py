# SPDX-License-Identifier: Apache-2.0
"""Options of optimum-rbln that are known here and not built, or that are asked for elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Unbuilt:
    """Why an option cannot be had, and the values that ask for nothing and are taken."""

    reason: str
    accepted: tuple[object, ...] = (None,)


_RSD = Unbuilt(
    "one worker over several devices (RSD) is not built yet: leave it out or give 1", (None, 1)
)
_PAGED = Unbuilt(
    "programs take positions and block tables, and no mask: leave it out", (None, False)
)
_BY_MODEL = Unbuilt("windows are those of the model's own configuration: leave it out")
_POOL = Unbuilt(
    "the KV pool is sized when the model is served: use --num-gpu-blocks-override or "
    "--gpu-memory-utilization there",
    (None, 0),
)
_HOST = Unbuilt("programs run on this machine's CPU: leave it out")

UNBUILT: Mapping[str, Unbuilt] = MappingProxyType(
    {
        "num_devices": _RSD,
        "tensor_parallel_size": _RSD,
        "use_attention_mask": _PAGED,
        "use_position_ids": _PAGED,
        "quantization": Unbuilt("quantised programs are not built yet: use the unquantised model"),
        "kvcache_num_blocks": _POOL,
        "memory_budget": _POOL,
        "cache_impl": Unbuilt("the KV cache is paged for every layer", (None, "static")),
        "sliding_window": _BY_MODEL,
        "sliding_window_layers": _BY_MODEL,
        "phases": Unbuilt("every model has a prefill and a decode phase"),
        "logits_to_keep": Unbuilt("logits are those of a sequence's last token", (None, 1)),
        "output_hidden_states": Unbuilt("hidden states are not an output", (None, False)),
        "device": _HOST,
        "device_map": _HOST,
        "activate_profiler": Unbuilt("there is no profiler yet", (None, False)),
        "timeout": Unbuilt("programs on the CPU have no time limit"),
    }
)
"""By the option's name."""


def without_unbuilt(entries: Mapping[str, Any], label: str) -> dict[str, Any]:
    """``entries`` without those that ask for nothing; ValueError for one that cannot be had."""
    for name, value in entries.items():
        if name in UNBUILT and value not in UNBUILT[name].accepted:
            raise ValueError(f"{label}: {name} {value!r}: {UNBUILT[name].reason}")
    return {name: value for name, value in entries.items() if name not in UNBUILT}
