# SPDX-License-Identifier: Apache-2.0
"""LMCache's configuration: what we refuse in it, and what we settle.

LMCache reads the file that ``LMCACHE_CONFIG_FILE`` names (without it, variables ``LMCACHE_*``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HASH = "sha256_cbor"
"""How LMCache hashes tokens: Python's own ``hash``, its default, differs between processes."""
DIRECTORY = "rbln.local_disk"
IDENTITY = "rbln.identity"
DISK = "LocalDiskBackend"
"""The name under which LMCache knows a disk backend, and looks for it in places."""
_PLUGIN = {
    f"storage_plugin.{DISK}.module_path": "rbln_vllm.distributed.kv_transfer.lmcache.disk",
    f"storage_plugin.{DISK}.class_name": "CheckedDiskBackend",
}


@dataclass(frozen=True)
class Refusal:
    """A setting that is refused when ``applies`` to a configuration; ``text`` says what to do."""

    text: str
    applies: Callable[[Any], bool]


REFUSALS = (
    Refusal(
        "use_layerwise: programs run all layers at once. Set it to false",
        lambda c: c.use_layerwise,
    ),
    Refusal("enable_blending is not supported: set it to false", lambda c: c.enable_blending),
    Refusal(
        "enable_async_loading is not supported: set it to false", lambda c: c.enable_async_loading
    ),
    Refusal(
        "prefill and decode in different processes (enable_pd, enable_p2p) is not supported with "
        "LMCache: leave them out",
        lambda c: c.enable_pd or c.enable_p2p,
    ),
    Refusal(
        "remote, GDS and Maru storage is not supported: use local_cpu and local_disk, and leave "
        "out remote_url, remote_storage_plugins, gds_path and maru_path",
        lambda c: bool(c.remote_url or c.remote_storage_plugins or c.gds_path or c.maru_path),
    ),
    Refusal(
        "storage_plugins is not supported: use local_cpu and local_disk",
        lambda c: bool(c.storage_plugins) and list(c.storage_plugins) != [DISK],
    ),
    Refusal(
        "external and bypassed lookup, hit_miss_ratio and enable_chunk_statistics are not "
        "supported: leave them out",
        lambda c: (
            c.external_lookup_client is not None
            or c.enable_scheduler_bypass_lookup
            or c.hit_miss_ratio is not None
            or c.enable_chunk_statistics
        ),
    ),
    Refusal(
        "enable_kv_events: its events name chunks that no router can follow. Set it to false and "
        "use vLLM's --kv-events-config",
        lambda c: c.enable_kv_events,
    ),
    Refusal(
        f"pre_caching_hash_algorithm: leave it out or set {HASH}",
        lambda c: c.pre_caching_hash_algorithm not in ("builtin", HASH),
    ),
    Refusal(
        "max_local_cpu_size: the memory that chunks pass through, also on their way to the disk. "
        "Set GiB above 0",
        lambda c: c.max_local_cpu_size <= 0,
    ),
    Refusal(
        "local_disk and max_local_disk_size go together: set both, the size in GiB, or neither",
        lambda c: bool(_directory(c)) != (c.max_local_disk_size > 0),
    ),
    Refusal(
        "nothing to store in: set local_cpu to true, or local_disk and max_local_disk_size",
        lambda c: not c.local_cpu and not _directory(c),
    ),
    Refusal("chunk_size: set a number of tokens, 1 or more", lambda c: c.chunk_size < 1),
)


def check(config: Any) -> None:
    """ValueError, with the setting to change, for what this connector cannot do."""
    for refusal in REFUSALS:
        if refusal.applies(config):
            raise ValueError(f"LMCache configuration: {refusal.text}.")


def settle(config: Any, identity: str) -> None:
    """Hash the same in every process, and keep chunks in our disk backend; in place.

    ``identity`` is the hex digest that separates models on one disk. A second call changes nothing.
    """
    config.pre_caching_hash_algorithm = HASH
    if config.local_disk:
        extra = {DIRECTORY: config.local_disk, IDENTITY: identity, **_PLUGIN}
        config.extra_config = {**(config.extra_config or {}), **extra}
        config.storage_plugins = [DISK]
        config.local_disk = None


def uses_disk(config: Any) -> bool:
    """Whether a settled configuration has a disk."""
    return bool(_directory(config))


def _directory(config: Any) -> str | None:
    directory = config.local_disk or (config.extra_config or {}).get(DIRECTORY)
    return str(directory) if directory else None
