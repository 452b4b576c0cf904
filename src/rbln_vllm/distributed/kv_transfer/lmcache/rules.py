# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's own configuration the connector cannot serve. Imports no LMCache."""

from typing import TYPE_CHECKING

from rbln_vllm import envs
from rbln_vllm.distributed.kv_transfer.lmcache import CONNECTOR, MISSING, is_installed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def settle_lmcache(vllm_config: "VllmConfig") -> None:
    """Prepare for the connector; ValueError, with what to change, for what it cannot do."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return
    if not is_installed():
        raise ValueError(MISSING)
    if transfer.kv_role != "kv_both":
        raise ValueError(f'{CONNECTOR} both stores and loads: give "kv_role": "kv_both"')
    if transfer.get_from_extra_config("use_native", False):
        raise ValueError(
            f"{CONNECTOR} uses the package lmcache: leave use_native out of "
            "kv_connector_extra_config"
        )
    # A cache: what cannot be loaded is computed, whatever it was.
    transfer.kv_load_failure_policy = "recompute"
    # A step that is scheduled ahead builds on a load before anybody knows whether it failed, and
    # vLLM takes its tokens.
    vllm_config.scheduler_config.async_scheduling = False
    envs.quiet_lmcache()


def check_pool(kv_cache_config: "KVCacheConfig") -> None:
    """ValueError for a pool whose blocks do not keep all tokens of a request."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        raise ValueError(
            f"{CONNECTOR} stores KV of full attention alone; this model's is "
            f"{[type(spec).__name__ for spec in specs]}. Leave out --kv-transfer-config."
        )
