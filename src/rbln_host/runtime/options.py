# SPDX-License-Identifier: Apache-2.0
"""How programs are run on this machine. Nothing here changes what a program is."""

import os
from dataclasses import dataclass
from enum import StrEnum


class Executor(StrEnum):
    """What runs programs."""

    NATIVE = "native"
    """Our kernels on our threads."""
    REFERENCE = "reference"
    """torch's CPU operators, command by command."""


@dataclass(frozen=True)
class ExecutorOptions:
    """Which executor, on which CPUs. Raises ValueError for CPUs or a time that cannot be."""

    executor: Executor = Executor.NATIVE
    cpus: tuple[int, ...] = ()
    """One thread runs on each, the caller's on the first; empty: all this process may use."""
    isa: str | None = None
    """The instruction set of the kernels; None: the best of this CPU."""
    spin_us: int = 20
    """Microseconds that an idle thread waits awake before it sleeps."""

    def __post_init__(self) -> None:
        if len(set(self.cpus)) != len(self.cpus) or any(cpu < 0 for cpu in self.cpus):
            raise ValueError(f"CPUs {self.cpus} are not different numbers from 0")
        if self.spin_us < 0:
            raise ValueError(f"spin_us={self.spin_us} is negative")

    @property
    def pool_cpus(self) -> list[int]:
        """The CPUs of the thread pool."""
        return list(self.cpus) or sorted(os.sched_getaffinity(0))
