# SPDX-License-Identifier: Apache-2.0
"""LMCache's local disk backend, made safe against the disk and against restarts.

Upstream's (0.5.6) takes what a file holds for the chunk, even when the file is gone or short; a
failed write keeps its memory and its place for ever; eviction raises when a file is gone; loading
waits without end for memory that pinned chunks hold; and its index lives in memory only.

Here every file carries a checksum and every failure is a miss. A file's name follows from its
chunk's key, so that chunks of earlier runs and of other processes are found when looked up.
"""

import copy
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import blake3
import torch
from lmcache.utils import CacheEngineKey, DiskCacheMetadata
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from vllm.logger import init_logger

from rbln_vllm.distributed.kv_transfer.lmcache.settings import DIRECTORY, IDENTITY
from rbln_vllm.distributed.kv_transfer.offload.block_file import (
    HEADER_BYTES,
    SUFFIX,
    TEMPORARY,
    DamagedBlockError,
    read_block,
    write_block,
)

logger = init_logger("vllm.rbln.lmcache")


class CheckedDiskBackend(LocalDiskBackend):
    """One file a chunk, in a directory of its own for each model content.

    LMCache's launcher of storage plugins constructs it (see settings.py). ``dict`` indexes the
    chunks this process has written or looked up; ``_unclaimed`` holds the sizes of other files.
    """

    path: str
    keys_in_request: list[CacheEngineKey]

    def __init__(
        self,
        config: Any,
        dst_device: str,
        metadata: LMCacheMetadata,
        local_cpu_backend: Any,
        loop: Any,
    ) -> None:
        upstream = copy.copy(config)
        upstream.local_disk = config.extra_config[DIRECTORY]
        super().__init__(upstream, loop, local_cpu_backend, dst_device, None, metadata)
        self._identity = bytes.fromhex(config.extra_config[IDENTITY])
        self._dtype = metadata.kv_dtype
        (self._token_shape,) = metadata.get_shapes(1)
        self.path = str(Path(self.path) / self._identity.hex()[:16])
        Path(self.path).mkdir(parents=True, exist_ok=True)
        self._unclaimed = _files_in(Path(self.path))
        self.current_cache_size = sum(self._unclaimed.values())
        logger.info("LMCache finds %d chunks in %s", len(self._unclaimed), self.path)

    # -- the index --------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        with self.disk_lock:
            if key not in self.dict:
                self._adopt(key)
        return bool(super().contains(key, pin))

    def touch_cache(self) -> None:
        with self.disk_lock:  # chunks may have failed since they were looked up
            self.keys_in_request = [key for key in self.keys_in_request if key in self.dict]
        super().touch_cache()

    def _adopt(self, key: CacheEngineKey) -> None:
        """Index the file of ``key`` if there is one; whether it is sound shows when it is read."""
        path = self._key_to_path(key)
        try:
            size = Path(path).stat().st_size - HEADER_BYTES
        except OSError:
            return
        per_token = self._token_shape.numel() * self._dtype.itemsize
        if size < per_token or size % per_token:
            return
        kv, layers, _, hidden = self._token_shape
        shape = torch.Size([kv, layers, size // per_token, hidden])
        if self._unclaimed.pop(path, None) is None:
            self.current_cache_size += size
        self.dict[key] = DiskCacheMetadata(
            path, size, shape, self._dtype, None, MemoryFormat.KV_2LTD, 0
        )
        self.cache_policy.update_on_put(key)

    def _key_to_path(self, key: CacheEngineKey) -> str:
        return str(Path(self.path) / f"{blake3.blake3(_key_bytes(key)).hexdigest()[:40]}{SUFFIX}")

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Forget a chunk and its file; ``force`` is False inside eviction, which has the lock."""
        if not force:
            return self._forget(key)
        with self.disk_lock:
            known = self.dict.get(key)
            if known is None:
                return False
            self.current_cache_size -= known.size
            self.cache_policy.update_on_force_evict(key)
            return self._forget(key)

    def _forget(self, key: CacheEngineKey) -> bool:
        known = self.dict.pop(key, None)
        if known is not None:
            _unlink(known.path)
        return known is not None

    def clear(self) -> int:
        """Forget everything, also other processes' files. Returns the tokens that were indexed."""
        with self.disk_lock:
            for path in self._unclaimed:
                _unlink(path)
            self.current_cache_size -= sum(self._unclaimed.values())
            self._unclaimed.clear()
            known = dict(self.dict)
        return sum(chunk.shape[2] for key, chunk in known.items() if self.remove(key))

    # -- writing ----------------------------------------------------------------------------------

    def submit_put_task(
        self, key: CacheEngineKey, memory_obj: MemoryObj, on_complete_callback: Any = None
    ) -> None:
        self._make_room(memory_obj.get_physical_size())
        super().submit_put_task(key, memory_obj, on_complete_callback)

    def _make_room(self, size: int) -> None:
        """Remove files that nobody has asked for, the oldest first, before upstream evicts."""
        with self.disk_lock:
            while self._unclaimed and self.current_cache_size + size > self.max_cache_size:
                path, freed = self._unclaimed.popitem(last=False)
                self.current_cache_size -= freed
                _unlink(path)

    def async_save_bytes_to_disk(
        self, key: CacheEngineKey, memory_obj: MemoryObj, on_complete_callback: Any = None
    ) -> None:
        """Write one chunk, in a thread of LMCache's; forget it when the disk does not take it."""
        path, metadata = Path(self._key_to_path(key)), memory_obj.metadata
        size = memory_obj.get_physical_size()
        try:
            write_block(path, self._identity, _key_bytes(key), _bytes_of(memory_obj))
        except OSError as error:
            logger.warning("LMCache could not write a chunk, which is not kept: %s", error)
            with self.disk_lock:
                self.current_cache_size -= size
        else:
            self.insert_key(key, size, metadata.shape, metadata.dtype, metadata.fmt)
        finally:
            memory_obj.ref_count_down()
            self.disk_worker.remove_put_task(key)

    # -- reading ----------------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read chunks in threads. None for each that cannot be had and all that follow it."""
        reserved = [self._reserve(key) for key in keys]
        loaded = list(self._read_thread_pool.map(self._load, keys, reserved))
        good = next((i for i, chunk in enumerate(loaded) if chunk is None), len(loaded))
        for chunk in loaded[good:]:
            if chunk is not None:
                chunk.ref_count_down()
        with self.disk_lock:
            for key in keys[:good]:
                if key in self.dict:
                    self.cache_policy.update_on_hit(key, self.dict)
        return [*loaded[:good], *[None] * (len(loaded) - good)]

    def _reserve(self, key: CacheEngineKey) -> MemoryObj | None:
        """Memory to read a chunk into. Never waits: who holds it may be waiting for us."""
        with self.disk_lock:
            known = self.dict.get(key)
        if known is None:
            return None
        cpu = self.local_cpu_backend
        return cpu.allocate(known.shape, known.dtype, known.fmt, busy_loop=False)

    def _load(self, key: CacheEngineKey, memory_obj: MemoryObj | None) -> MemoryObj | None:
        if memory_obj is None:
            return None
        path = Path(self._key_to_path(key))
        try:
            read_block(path, self._identity, _key_bytes(key), _bytes_of(memory_obj))
        except (OSError, DamagedBlockError) as error:
            logger.warning(
                "LMCache could not read chunk %s, which is computed again: %s", path, error
            )
            memory_obj.ref_count_down()
            self.remove(key)
            return None
        return memory_obj


def _key_bytes(key: CacheEngineKey) -> bytes:
    """What separates chunks of one model content. The model's name is not part of it."""
    tags = sorted((str(name), str(value)) for name, value in key.tags or ())
    place = [key.world_size, key.worker_id, f"{key.chunk_hash:x}"]
    return json.dumps([*place, tags]).encode()


def _bytes_of(memory_obj: MemoryObj) -> memoryview:
    """A chunk's memory. LMCache's own view of it has a format that others do not accept."""
    return memoryview(memory_obj.tensor.reshape(-1).view(torch.uint8).numpy())


def _files_in(directory: Path) -> OrderedDict[str, int]:
    """Size of every chunk's payload, the oldest first; leftovers of killed writers are removed."""
    found = []
    for path in directory.iterdir():
        try:
            if path.name.endswith(TEMPORARY):
                path.unlink()
            elif path.name.endswith(SUFFIX):
                state = path.stat()
                found.append((state.st_mtime_ns, str(path), state.st_size - HEADER_BYTES))
        except OSError as error:
            logger.warning("LMCache leaves out %s: %s", path, error)
    return OrderedDict((path, size) for _, path, size in sorted(found))


def _unlink(path: str) -> None:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("LMCache could not remove %s: %s", path, error)
