# SPDX-License-Identifier: Apache-2.0
"""Points vLLM's offload options at what this device has, and refuses the rest in words."""

from typing import TYPE_CHECKING

import vllm.envs as vllm_envs

from rbln_vllm.distributed.kv_transfer.offload.options import GIB, OffloadOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "OffloadingConnector"
CONNECTOR_MODULE = "rbln_vllm.distributed.kv_transfer.offload.connector"
SPEC, SPEC_MODULE = "HostOffloadingSpec", "rbln_vllm.distributed.kv_transfer.offload.spec"


def settle_offload(vllm_config: "VllmConfig") -> None:
    """Makes ``--kv-offloading-size`` and an OffloadingConnector use our connector and spec.

    Runs before vLLM turns the size into a transfer config. Raises ValueError for options that
    cannot work here, with what to change.
    """
    size = vllm_config.cache_config.kv_offloading_size
    native = vllm_config.cache_config.kv_offloading_backend == "native"
    if size is not None and native:
        _from_size(vllm_config, size)
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        _use_ours(transfer)


def offload_memory_bytes(vllm_config: "VllmConfig") -> int:
    """What the memory tier may come to take; 0 without one."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return 0
    return int(transfer.kv_connector_extra_config.get("cpu_bytes_to_use", 0))


def _from_size(vllm_config: "VllmConfig", size_gib: float) -> None:
    """What vLLM would make of the size, in the environment and role that it would choose."""
    from vllm.config import KVTransferConfig

    if vllm_envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
        raise ValueError(
            "VLLM_USE_SIMPLE_KV_OFFLOAD needs CUDA: unset it, and --kv-offloading-size uses the "
            f"{CONNECTOR}"
        )
    transfer = vllm_config.kv_transfer_config or KVTransferConfig()
    transfer.kv_connector, transfer.kv_role = CONNECTOR, "kv_both"
    transfer.kv_connector_extra_config["cpu_bytes_to_use"] = int(size_gib * GIB)
    vllm_config.kv_transfer_config = transfer


def _use_ours(transfer: "KVTransferConfig") -> None:
    if transfer.kv_role != "kv_both":
        raise ValueError(f'{CONNECTOR} both stores and loads: give "kv_role": "kv_both"')
    extra = transfer.kv_connector_extra_config
    if extra.get("spec_name", SPEC) != SPEC:
        raise ValueError(
            f"The offloading spec {extra['spec_name']} copies on CUDA or XPU streams: leave "
            "spec_name out of kv_connector_extra_config"
        )
    OffloadOptions.parse(extra)
    extra.update(spec_name=SPEC, spec_module_path=SPEC_MODULE)
    transfer.kv_connector_module_path = CONNECTOR_MODULE
    # These tiers are a cache: what cannot be loaded is computed, whatever it was.
    transfer.kv_load_failure_policy = "recompute"
