# SPDX-License-Identifier: Apache-2.0
"""The memory tier: one piece of anonymous memory that scheduler and worker both see.

vLLM's own ``SharedOffloadRegion`` lies in /dev/shm, which containers make small (64 MiB by
default), and takes all its memory at start. This one takes pages as they are first written and
needs no file system; where the worker has a process of its own, it finds the memory through a
link to the open file of whoever came first. The system frees it when both are gone, however they
went. There are two sides, scheduler and worker: the second removes the link.
"""

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class OffloadRegion:
    """``num_chunks`` rows of ``row_bytes`` each; the same memory for all of one ``engine_id``."""

    def __init__(self, engine_id: str, num_chunks: int, row_bytes: int) -> None:
        """Raises OSError when the memory cannot be had."""
        self._name = f"rbln_offload_{engine_id}"
        self._link = Path(tempfile.gettempdir()) / f"{self._name}.{os.getuid()}"
        self._size = num_chunks * row_bytes
        self._made = False
        self._descriptor = self._open()
        try:
            memory = mmap.mmap(self._descriptor, self._size)
        except OSError:
            self.cleanup()
            raise
        self.rows_CB: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(
            num_chunks, row_bytes
        )

    def create_kv_memoryview(self) -> memoryview:
        """``[num_chunks, row_bytes]``, as vLLM's tiers want it."""
        return memoryview(self.rows_CB)  # type: ignore[arg-type]  # stubs before PEP 688

    def cleanup(self) -> None:
        """Closes this side's file; the memory goes with the last view of it."""
        if self._descriptor < 0:
            return
        if self._made:
            self._link.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> int:
        """Joins the region if it is there, else makes it.

        A link left by an engine that was killed leads nowhere, or to another file: it is replaced.
        """
        joined = self._join()
        if joined is not None:
            self._link.unlink(missing_ok=True)
            return joined
        descriptor = os.memfd_create(self._name)
        os.ftruncate(descriptor, self._size)
        while True:
            try:
                self._link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
                self._made = True
                return descriptor
            except FileExistsError:
                self._link.unlink(missing_ok=True)

    def _join(self) -> int | None:
        try:
            target = os.readlink(self._link)
            owner = os.readlink(target)
            if f"memfd:{self._name} " not in f"{owner} ":
                return None
            descriptor = os.open(target, os.O_RDWR)
        except OSError:
            return None
        if os.fstat(descriptor).st_size == self._size:
            return descriptor
        os.close(descriptor)
        return None
