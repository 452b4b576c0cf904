# SPDX-License-Identifier: Apache-2.0
"""How many threads programs may use: the CPUs this process may run on, never more."""

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def allowed_threads(quota_file: Path = CGROUP_QUOTA) -> int:
    """The allowed CPU set, cut to the container's quota; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(quota_file)
    return max(1, affinity if quota is None else min(affinity, quota))


def cpu_quota(quota_file: Path) -> int | None:
    """Whole CPUs a cgroup v2 quota allows (rounded up), None without one."""
    try:
        limit, period = quota_file.read_text().split()
        return None if limit == "max" else math.ceil(int(limit) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
