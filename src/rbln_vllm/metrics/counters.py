# SPDX-License-Identifier: Apache-2.0
"""Numbers that cross processes: the worker writes, the API server shows and watches.

vLLM's statistics have no field for a platform's own numbers, so they go through a small
memory-mapped file whose path is derived from the engine's instance id.
"""

import tempfile
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Counter(IntEnum):
    """Position of each number in the file."""

    TOTAL = 0
    COMPILED_AFTER_READY = 1
    REFUSED = 2
    ENGINE_PID = 3
    BEAT = 4
    """Monotonic nanoseconds of the worker's last sign of life."""
    BUSY_SINCE = 5
    """Monotonic nanoseconds at which the running step began; 0 between steps."""


def counter_path(instance_id: str) -> Path:
    """The file of one engine, in the system's temporary directory."""
    return Path(tempfile.gettempdir()) / f"rbln-vllm-{instance_id}.counters"


@dataclass
class ProgramCounters:
    """int64 numbers, one per :class:`Counter`; aligned 8-byte stores are seen whole."""

    values: NDArray[np.int64]

    @classmethod
    def in_memory(cls) -> "ProgramCounters":
        return cls(np.zeros(len(Counter), dtype=np.int64))

    @classmethod
    def create(cls, path: Path) -> "ProgramCounters":
        """Make the file, or open the one the other process made first."""
        size = len(Counter) * np.dtype(np.int64).itemsize
        with path.open("ab") as file:
            if file.tell() < size:
                file.truncate(size)
        return cls(np.memmap(path, dtype=np.int64, mode="r+", shape=(len(Counter),)))

    def set_total(self, programs: int) -> None:
        self.values[Counter.TOTAL] = programs

    def add_late(self) -> None:
        self.values[Counter.COMPILED_AFTER_READY] += 1

    def add_refused(self, requests: int) -> None:
        self.values[Counter.REFUSED] += requests

    def set(self, counter: Counter, value: int) -> None:
        self.values[counter] = value

    def __getitem__(self, counter: Counter) -> int:
        return int(self.values[counter])
