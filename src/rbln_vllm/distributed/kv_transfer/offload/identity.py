# SPDX-License-Identifier: Apache-2.0
"""What a block of KV depends on besides the tokens in its hash.

Blocks on disk outlive the engine. Their files carry a digest of all this and are found under it,
so that another model, geometry, compiler or way of hashing never finds them.
"""

import json
from typing import TYPE_CHECKING

import blake3
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from rbln_vllm import envs
from rbln_vllm.models.content import cache_key
from rbln_vllm.toolchain import host_toolchain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = init_logger("vllm.rbln.offload")

FORMAT = "1"


def describe_blocks(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: "OffloadingConfig"
) -> dict[str, str]:
    """Every part of the identity, as text. Reads the checkpoint unless its digest is remembered.

    The programs' cache key covers model content, implementation, dtypes and versions; the longest
    sequence is part of it because some models choose their position encoding by it.

    Raises ValueError when blocks of another process could not be recognised.
    """
    groups = kv_cache_config.kv_cache_groups
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return {
        **_program_key(vllm_config),
        "format": FORMAT,
        "layout": str(config.kv_cache_layout),
        "groups": repr([(group.layer_names, group.kv_cache_spec) for group in groups]),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "rank": f"{config.parallel.rank} of {config.parallel.world_size}",
        "hash": algorithm,
        "hash_seed": stable_hash_seed(algorithm),
    }


def identity_of(description: dict[str, str]) -> bytes:
    """32 bytes that differ when any part does."""
    return bytes(blake3.blake3(json.dumps(description, sort_keys=True).encode()).digest())


def stable_hash_seed(algorithm: str) -> str:
    """What block hashes start from. Raises ValueError where every process has another one."""
    function = get_hash_fn_by_name(algorithm)
    seed: str = resolve_none_hash_seed(function)
    if resolve_none_hash_seed(function) != seed:
        raise ValueError(
            f"KV offload to disk: block hashes by {algorithm} differ from process to process, so "
            "that a restart would find nothing: use --prefix-caching-hash-algo sha256, or set "
            "PYTHONHASHSEED"
        )
    return seed


def _program_key(vllm_config: "VllmConfig") -> dict[str, str]:
    toolchain = host_toolchain()
    cache = toolchain.cache(envs.cache_root() / "rbln", logger)
    return dict(cache_key(vllm_config, toolchain, cache.digest).parts)
