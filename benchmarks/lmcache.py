"""LMCache's local disk backend under the same calls: its own memory objects between the host pool and a file per page.

It is no HiCacheStorage: in its own engines pages go from the device into its memory objects. Here they come from the
host pool, in one native copy per batch, which is what this tier pays too.
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.backends import Backend
from tutti_sglang import memory

DRAIN_SECONDS = 60.0


class LMCache(Backend):
    """`LocalDiskBackend` (lmcache/v1/storage_backend/local_disk_backend.py, 0.5.6) over its `LocalCPUBackend`."""

    def __init__(self, directory: Path, pool: Any, options: Any) -> None:
        self.directory, self.pool = directory, pool
        self._put: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.storage = self.create(dict(options))

    def create(self, options: dict[str, Any]) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        pool = self.pool
        shape = (pool.layer_num, 2, pool.page_size, pool.head_num, pool.head_dim)
        self._dtype, width = pool.dtype, pool.head_num * pool.head_dim
        self._shape = torch.Size((2, pool.layer_num, pool.page_size, width))
        self._format, self._key = MemoryFormat.KV_2LTD, CacheEngineKey
        room = pool.kv_buffer.numel() * pool.kv_buffer.element_size()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=pool.page_size,
            local_cpu=False,
            max_local_cpu_size=(2 * room + (1 << 30)) / 2**30,
            local_disk=str(self.directory),
            max_local_disk_size=(2 * room + (1 << 30)) / 2**30,
            extra_config={"use_odirect": True} | options,
        )
        about = LMCacheMetadata("benchmark", 1, 1, 0, 0, pool.dtype, shape, chunk_size=pool.page_size)
        self._memory = LocalCPUBackend(config, about, dst_device="cpu")
        return LocalDiskBackend(config, self._loop, self._memory, dst_device="cpu")

    def describe(self) -> str:
        return "local disk backend: a file per page, O_DIRECT, 4 threads, copies through its memory objects"

    def exists(self, keys: list[str]) -> int:
        for count, key in enumerate(self._keys(keys)):
            if not self.storage.contains(key):
                return count
        return len(keys)

    def put(self, keys: list[str], indices: Any) -> bool:
        objects = [self._memory.allocate(self._shape, self._dtype, self._format) for _ in keys]
        if None in objects:
            return False
        rows, sizes = self._rows(indices, len(keys))
        memory.copy_rows(self._places(objects, sizes), rows, sizes)
        names = self._keys(keys)
        self._put += names
        self.storage.batched_submit_put_task(names, objects)
        for each in objects:
            each.ref_count_down()
        return True

    def get(self, keys: list[str], indices: Any) -> bool:
        objects = self.storage.batched_get_blocking(self._keys(keys))
        if None in objects:
            return False
        rows, sizes = self._rows(indices, len(keys))
        memory.copy_rows(rows, self._places(objects, sizes), sizes)
        for each in objects:
            each.ref_count_down()
        return True

    def settle(self) -> None:
        """Its writes go on in the background, and what it has no room for it drops without a word."""
        until = time.monotonic() + DRAIN_SECONDS
        while self.storage.disk_worker.put_tasks:
            assert time.monotonic() < until, "LMCache did not write within a minute"
            time.sleep(0.001)
        assert all(key in self.storage.dict for key in self._put), "LMCache did not store all that it took"

    def clear(self) -> None:
        self.settle()
        for key in list(self.storage.dict):
            self.storage.remove(key)
        self.storage.current_cache_size = 0.0  # which `remove` leaves as it was
        self._put = []
        super().clear()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        super().close()

    def _keys(self, keys: list[str]) -> list[Any]:
        return [self._key("benchmark", 1, 0, int(key[:16], 16), self._dtype) for key in keys]

    def _rows(self, indices: Any, pages: int) -> tuple[Any, Any]:
        """(pages, parts) addresses in the pool; (parts,) sizes."""
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        parts = len(pointers) // pages
        return np.array(pointers, np.uint64).reshape(pages, parts), np.array(sizes[:parts], np.uint64)

    def _places(self, objects: list[Any], sizes: Any) -> Any:
        starts = np.array([each.data_ptr for each in objects], np.uint64)
        return starts[:, None] + (np.cumsum(sizes) - sizes)
