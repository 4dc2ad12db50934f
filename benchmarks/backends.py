"""The backends that are compared, each called exactly as SGLang 0.5.23's cache controller calls it."""

import ctypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BATCH = 128  # pages per call: STORAGE_BATCH_SIZE, mem_cache/hicache_storage.py:24


class Backend:
    """One HiCacheStorage on one directory.

    `put` and `get` move one batch of at most BATCH pages between host rows and storage; `settle` returns when what was
    put is on the drive, whatever it takes; `clear` empties the directory for the next round.
    """

    def __init__(self, directory: Path, pool: Any, options: Mapping[str, Any]) -> None:
        self.directory, self.pool = directory, pool
        self.storage = self.create(dict(options))
        self.storage.register_mem_pool_host(pool)

    def create(self, options: dict[str, Any]) -> Any:
        """The backend itself."""
        raise NotImplementedError

    def describe(self) -> str:
        """Which way its bytes go."""
        return ""

    def exists(self, keys: list[str]) -> int:
        """Leading keys that are stored; SGLang asks once for all pages of a request."""
        return int(self.storage.batch_exists(keys))

    def put(self, keys: list[str], indices: Any) -> bool:
        """`_page_set_zero_copy`, managers/cache_controller.py:1412."""
        return all(self.storage.batch_set_v1(keys, indices, None))

    def get(self, keys: list[str], indices: Any) -> bool:
        """`_page_get_zero_copy`, managers/cache_controller.py:1112."""
        return all(self.storage.batch_get_v1(keys, indices, None))

    def settle(self) -> None:
        """O_DIRECT leaves nothing to wait for."""

    def clear(self) -> None:
        """Remove the files; directories stay, because NIXL makes its own only once."""
        for root, _, files in os.walk(self.directory):
            for name in files:
                os.unlink(os.path.join(root, name))

    def close(self) -> None:
        """Stop its threads and remove what it wrote."""
        if hasattr(self.storage, "close"):
            self.storage.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Tutti(Backend):
    """This tier, through its HiCache class; options are those of the extra config."""

    def create(self, options: dict[str, Any]) -> Any:
        from tutti_sglang.integration.hicache import TuttiHiCacheStorage

        extra = {"storage_dirs": [str(self.directory)], "max_size": "64GiB"} | options
        return TuttiHiCacheStorage(storage_config(self.pool, extra), self.pool)

    def describe(self) -> str:
        return str(self.storage._tier.store.describe())

    def settle(self) -> None:
        assert self.storage._tier.store.drain(60.0), "the store did not drain within a minute"

    def clear(self) -> None:
        self.storage.clear()


class File(Backend):
    """SGLang's `file` backend: not in the list of zero-copy names, so pages are copied on the way, in Python."""

    def create(self, options: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        return HiCacheFile(storage_config(self.pool, options), file_path=str(self.directory))

    def describe(self) -> str:
        return "a file per page, buffered, one read or write at a time"

    def put(self, keys: list[str], indices: Any) -> bool:
        """`_generic_page_set`, managers/cache_controller.py:1404."""
        size = self.pool.page_size
        data = [self.pool.get_data_page(indices[i * size]) for i in range(len(keys))]
        return bool(self.storage.batch_set(keys, data))

    def get(self, keys: list[str], indices: Any) -> bool:
        """`_generic_page_get`, managers/cache_controller.py:1127."""
        places = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.storage.batch_get(keys, places)
        for i, page in enumerate(pages):
            if page is None:
                return False
            self.pool.set_from_flat_data_page(indices[i * self.pool.page_size], page)
        return True

    def settle(self) -> None:
        """Its writes are in the page cache: have the file system written out."""
        sync_file_system(self.directory)


class Nixl(Backend):
    """SGLang's `nixl` backend with the POSIX plugin: zero copy, O_DIRECT, a file per K and per V of a page."""

    def create(self, options: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        os.environ["SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"] = "POSIX"
        extra = {"l3_cleaner_enabled": False} | options
        return HiCacheNixl(storage_config(self.pool, extra), file_path=str(self.directory))

    def describe(self) -> str:
        storage = self.storage
        opened = "by path" if storage.registry.path_mode else "opened in Python"
        return f"POSIX, {'zero copy' if storage.is_zero_copy else 'bounce copy'}, files {opened}"


def storage_config(pool: Any, extra: dict[str, Any]) -> Any:
    """What `_generate_storage_config` makes for one rank of dense attention (managers/cache_controller.py:748)."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name="benchmark",
        extra_config=extra,
    )


def sync_file_system(directory: Path) -> None:
    """syncfs(2) of the file system below `directory`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(descriptor)


def drop_page_cache(directory: Path) -> int:
    """Have the kernel forget every file below `directory`, without root. Bytes that stayed; 0 where it cannot tell."""
    left = 0
    for root, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                left += _cached_bytes(descriptor)
            finally:
                os.close(descriptor)
    return left


def _cached_bytes(descriptor: int) -> int:
    """cachestat(2), Linux ≥ 6.5: the same number on every architecture."""
    whole = (ctypes.c_uint64 * 2)(0, 0)
    found = (ctypes.c_uint64 * 5)()
    failed = ctypes.CDLL(None).syscall(451, descriptor, ctypes.byref(whole), ctypes.byref(found), 0)
    return 0 if failed else found[0] * os.sysconf("SC_PAGE_SIZE")
