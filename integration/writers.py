"""Which rank writes what several ranks hold alike (MLA): one for each store, not one for each server.

SGLang lets TP rank 0 write and the others read (hicache_storage.py:69). Ranks on another machine, or with a directory
of their own, have another store: there the first of them must write, or they never find a page and no rank does.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from typing import Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from tutti_sglang.config import Config
from tutti_sglang.errors import StoreError
from tutti_sglang.store import superblock

logger = logging.getLogger(__name__)


class Place(msgspec.Struct, frozen=True):
    """What a rank tells the others. `shard`: equal where ranks hold the same bytes; `store`: the store's own id."""

    store: str
    shard: tuple[int, ...]
    tp_rank: int


class Writer(HiCacheStorageConfig):  # type: ignore[misc]  # the wheel has no types
    """The configuration of a rank that writes although SGLang chose another."""

    @property
    def is_storage_writer(self) -> bool:
        """Asked by SGLang before each backup (managers/cache_controller.py:745)."""
        return True


def place(storage: HiCacheStorageConfig, config: Config) -> Place:
    """Of this rank."""
    shard = (storage.pp_rank, storage.attn_cp_rank, storage.dp_rank, storage.dcp_rank)
    return Place(_store_id(config.storage_dirs), shard, storage.tp_rank)


def must_write(mine: Place, all_ranks: Iterable[Place]) -> bool:
    """Whether this rank is the first of those with the same bytes that reach its store."""
    same = [each.tp_rank for each in all_ranks if (each.store, each.shard) == (mine.store, mine.shard)]
    return mine.tp_rank == min(same, default=mine.tp_rank)


def let_write(controller: Any) -> None:
    """SGLang backs up replicated KV on this rank too."""
    fields = {name: getattr(controller.storage_config, name) for name in HiCacheStorageConfig.__dataclass_fields__}
    controller.storage_config = Writer(**fields)
    logger.info("tutti: this rank writes replicated KV: it is the first whose storage_dirs hold this store")


def _store_id(directories: tuple[str, ...]) -> str:
    for path in directories:
        with contextlib.suppress(OSError, StoreError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if block := superblock.read(descriptor, path):
                    return block.store
            finally:
                os.close(descriptor)
    return ""
