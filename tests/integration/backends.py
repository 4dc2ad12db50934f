"""Backends on one store, as SGLang's factory makes and forgets them."""

from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.integration.host_pools import storage
from tutti_sglang.integration.hicache import TuttiHiCacheStorage


class Backends:
    """`directory`: of the store; it need not exist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[TuttiHiCacheStorage] = []

    def open(self, pool: Any = None, *, extra: dict[str, Any] | None = None, **changed: Any) -> TuttiHiCacheStorage:
        """One more, with `pool` registered as its anchor. `extra`: settings; `changed`: of HiCacheStorageConfig."""
        settings = {
            "storage_dirs": [str(self._directory)],
            "max_size": "64MiB",
            "segment_size": "2MiB",
            "min_free_space": "1MiB",
            "staging_size": "16MiB",
            **(extra or {}),
        }
        backend = TuttiHiCacheStorage(storage(extra_config=settings, **changed), pool)
        self._open = [each for each in self._open if not each.closed] + [backend]  # SGLang forgets what it closed too
        if pool is not None:
            backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, PoolName.KV)
            backend.on_host_pools_registered()
        return backend

    def close(self) -> None:
        """All of them."""
        for backend in self._open:
            backend.close()
