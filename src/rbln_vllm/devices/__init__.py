# SPDX-License-Identifier: Apache-2.0
"""Device profiles: the one place that knows which devices there are."""

from rbln_vllm.devices.memory import aligned_weight_bytes, npu_kv_budget
from rbln_vllm.devices.profile import GIB, MIB, DeviceProfile, Family
from rbln_vllm.devices.table import ATOM, HOST, PROFILES, REBEL100, resolve_profile

__all__ = [
    "ATOM",
    "GIB",
    "HOST",
    "MIB",
    "PROFILES",
    "REBEL100",
    "DeviceProfile",
    "Family",
    "aligned_weight_bytes",
    "npu_kv_budget",
    "resolve_profile",
]
