# SPDX-License-Identifier: Apache-2.0
"""What the memory of an NPU has room for: the vendor's static estimate."""

from collections.abc import Iterable

from rbln_vllm.devices.profile import MIB, DeviceProfile, Family

# What one loaded program costs in device memory besides its weights (the vendor's estimate).
RUNTIME_BUFFER_BYTES = 256 * MIB
WEIGHT_ALIGNMENT_BYTES = 2 * MIB


def aligned_weight_bytes(parts: Iterable[int]) -> int:
    """Device bytes of weights stored as `parts` (bytes per layer, lm_head), each 2 MiB aligned."""
    unit = WEIGHT_ALIGNMENT_BYTES
    return sum(-(-part // unit) * unit for part in parts)


def npu_kv_budget(
    profile: DeviceProfile,
    utilization: float,
    weight_bytes: int,
    num_runtimes: int,
    num_devices: int,
    *,
    num_kv_heads: int | None = None,
) -> int:
    """Bytes left for the KV cache on an NPU: the vendor's static estimate.

    `num_runtimes` counts loaded programs, `num_devices` the NPUs of one worker. With fewer
    `num_kv_heads` than compute dies the heads are replicated, which costs that much of the budget.

    Raises ValueError on HOST (its memory is measured, not estimated) and for more than one Rebel100
    per worker; MemoryError if weights and runtimes do not fit.
    """
    if profile.memory_bytes is None:
        raise ValueError(f"{profile.name} has no static memory estimate: measure free memory")
    if profile.family is Family.REBEL100 and num_devices != 1:
        raise ValueError(
            f"num_devices_per_local_rank must be 1 on {profile.name}, not {num_devices}"
        )
    width = num_devices * profile.chiplets
    usable = int((profile.memory_bytes - profile.reserved_bytes) * num_devices * utilization)
    buffers = RUNTIME_BUFFER_BYTES * num_runtimes * width
    budget = usable - weight_bytes - buffers
    if budget < 0:
        raise MemoryError(_out_of_memory_text(profile, utilization, usable, weight_bytes, buffers))
    replication = max(1, width // num_kv_heads) if num_kv_heads else 1
    return budget // replication


def _out_of_memory_text(
    profile: DeviceProfile, utilization: float, usable: int, weight_bytes: int, buffers: int
) -> str:
    return (
        f"Insufficient DRAM on {profile.name}: {usable // MIB} MiB are usable at "
        f"gpu_memory_utilization {utilization}, but weights need {weight_bytes // MIB} MiB and "
        f"programs {buffers // MIB} MiB. Use a smaller model, fewer decode buckets or a higher "
        "--gpu-memory-utilization (reducing gpu_memory_utilization shrinks the usable part)."
    )
