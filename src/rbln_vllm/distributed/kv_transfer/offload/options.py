# SPDX-License-Identifier: Apache-2.0
"""The options of KV offload, from ``kv_connector_extra_config``."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_DISK_BYTES = 16 * GIB
STAGING_BYTES = 256 * MIB
"""Memory between pool and disk when no memory tier is asked for."""

OURS = frozenset(
    {
        "cpu_bytes_to_use",
        "disk_directory",
        "disk_bytes_to_use",
        "disk_read_threads",
        "load_policy",
    }
)
# Options of vLLM's connector and of its memory tier that work here as they do there.
UPSTREAM = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "eviction_policy",
        "cache_policy_module_path",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_name",
        "spec_module_path",
    }
)
REFUSED = {
    "secondary_tiers": "name the directory in disk_directory instead",
    "canonical_layout": "blocks have one layout here; leave it out",
    "store_threshold": "every full block is stored; leave it out",
    "backpressure": "the disk tier limits what waits to be written by itself; leave it out",
}


class LoadPolicy(Enum):
    """When stored KV is loaded: where loading is cheaper than computing, or always."""

    MEASURED = "measured"
    ALWAYS = "always"


@dataclass(frozen=True)
class OffloadOptions:
    """``cpu_bytes`` 0 with a directory is disk only: memory then is a stage of modest size."""

    cpu_bytes: int
    disk_directory: Path | None
    disk_bytes: int
    disk_read_threads: int
    load_policy: LoadPolicy

    def __post_init__(self) -> None:
        if self.cpu_bytes < 0 or self.disk_bytes <= 0:
            raise ValueError(
                "KV offload: cpu_bytes_to_use must not be negative, disk_bytes_to_use be positive"
            )
        if not self.cpu_bytes and self.disk_directory is None:
            raise ValueError(
                "KV offload has nowhere to put blocks: give --kv-offloading-size GIB, or "
                "cpu_bytes_to_use and/or disk_directory in kv_connector_extra_config"
            )
        if self.disk_read_threads < 1:
            raise ValueError("KV offload: disk_read_threads must be 1 or more")

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> "OffloadOptions":
        """Raises ValueError for an unknown, refused or impossible option, with what to change."""
        options = dict(extra_config)
        for name in options:
            _check_known(name)
        directory = options.get("disk_directory")
        return cls(
            cpu_bytes=_number(options, "cpu_bytes_to_use", 0),
            disk_directory=Path(directory) if directory else None,
            disk_bytes=_number(options, "disk_bytes_to_use", DEFAULT_DISK_BYTES),
            disk_read_threads=_number(options, "disk_read_threads", 2),
            load_policy=_policy(options.get("load_policy", LoadPolicy.MEASURED.value)),
        )


def _number(options: dict[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"KV offload: {name} must be a number, not {value!r}")
    return int(value)


def _policy(value: Any) -> LoadPolicy:
    known = [policy.value for policy in LoadPolicy]
    if value not in known:
        raise ValueError(f"KV offload: load_policy must be one of {known}, not {value!r}")
    return LoadPolicy(value)


def _check_known(name: str) -> None:
    if name in REFUSED:
        raise ValueError(f"KV offload: {name} is not supported: {REFUSED[name]}")
    if name not in OURS | UPSTREAM:
        known = ", ".join(sorted(OURS | UPSTREAM))
        raise ValueError(f"KV offload has no option {name}; it has {known}")
