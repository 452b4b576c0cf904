# SPDX-License-Identifier: Apache-2.0
"""Where programs may run: CPUs this process may use, one per physical core, never more."""

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed_cpus(quota_file: Path = CGROUP_QUOTA, topology: Path = TOPOLOGY) -> tuple[int, ...]:
    """CPUs to run a thread on each: of the allowed set the first of every core, cut to the
    container's quota; at least one.

    Two threads of a core share its matrix units and caches, so a second one gains nothing.
    """
    cores = {core_of(cpu, topology): cpu for cpu in sorted(os.sched_getaffinity(0), reverse=True)}
    cpus = sorted(cores.values())
    quota = cpu_quota(quota_file)
    return tuple(cpus if quota is None else cpus[: max(1, quota)])


def core_of(cpu: int, topology: Path = TOPOLOGY) -> str:
    """Equal for the CPUs of one physical core; where that is unknown every CPU is one."""
    try:
        return (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu{cpu}"


def cpu_quota(quota_file: Path) -> int | None:
    """Whole CPUs a cgroup v2 quota allows (rounded up), None without one."""
    try:
        limit, period = quota_file.read_text().split()
        return None if limit == "max" else math.ceil(int(limit) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
