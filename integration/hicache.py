"""SGLang's HiCache storage backend (HiCacheStorage): translates its calls into lookups, gets and puts of pages.

Called by up to five threads of a scheduler process at once (sglang managers/cache_controller.py). No call raises, none
outlasts its deadline, none touches host rows after it returned.
"""

import logging
import time
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from tutti_sglang.integration import hooks, live
from tutti_sglang.integration.calls import Calls, guarded, key_bytes
from tutti_sglang.integration.hashing import load_hashing
from tutti_sglang.integration.pools import view_of
from tutti_sglang.integration.prefix import leading, restorable
from tutti_sglang.integration.stats import Stats
from tutti_sglang.integration.stored import Found
from tutti_sglang.integration.tier import Tier
from tutti_sglang.integration.waits import process_waits
from tutti_sglang.integration.writers import Place
from tutti_sglang.metrics import process_metrics
from tutti_sglang.store import ABSENT

logger = logging.getLogger(__name__)

READ_SECONDS, WRITE_SECONDS, CROWDED_SECONDS = 8.0, 5.0, 0.1
"""Deadlines of a call: SGLang's flush and detach fail when one lasts 10 s. The last: of a put after one that waited its
time for room and found none."""

CLOSE_SECONDS = 9.0


def _misses(keys: list[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_tensors(keys: list[str], *_: Any, **__: Any) -> list[None]:
    return [None] * len(keys)


def _pool_misses(transfers: list[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    # Every pool that was asked for: SGLang takes a missing one for present (cache_controller.py:1236).
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class TuttiHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # the wheel has no types
    """The tier behind SGLang's host pools.

    `mem_pool_host`: the anchor pool (built-in route); None or a dict (`dynamic` route, storage/backend_factory.py:166).
    Raises ConfigError, StoreError or UnsupportedError here and when a pool is registered, never later.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any = None) -> None:
        self.closed = False
        self._suspended = False
        self._crowded = False
        self._stats = Stats(process_metrics(), metered=storage_config.enable_storage_metrics)
        self._calls = Calls(process_metrics())
        self._waits = process_waits()
        extra = storage_config.extra_config
        if mem_pool_host is not None and not isinstance(mem_pool_host, dict):
            view_of(mem_pool_host)  # a pool that is not served is no reason to open files
        else:
            hooks.ensure()
            if extra is not None:
                # Asked after the constructor (cache_controller.py:662); without it a page takes two more copies.
                extra.setdefault("interface_v1", 1)
        load_hashing()
        self._tier = Tier(storage_config, generic=not (extra or {}).get("interface_v1", 1))
        live.add(self)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach the anchor pool; UnsupportedError names what is served instead."""
        super().register_mem_pool_host(mem_pool_host)
        self._tier.attach(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Attach a side pool, or see the anchor again under its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._tier.attach(host_pool_name, host_pool)

    @guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Length of the leading run of pages that are there, as far as loading them pays; 0 where side pools hold
        them, and none is named."""
        if self._tier.anchor_is_logical:
            return 0
        with self._waits.looking_up(len(keys)):
            places = self._tier.locate(PoolName.KV, key_bytes(keys))
        length = leading(places != ABSENT)
        self._stats.looked_up({PoolName.KV: length}, [], len(keys))
        return self._tier.worth_loading(range(1, length + 1), places)

    @guarded(_misses)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill the host pages; one bool for each key."""
        return self._get(PoolName.KV, keys, host_indices, time.monotonic() + READ_SECONDS)

    @guarded(_misses)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store the host pages; True: it is there already, stored, or accepted and served from here."""
        return self._put(PoolName.KV, keys, host_indices, self._patience(), _depth(extra_info))

    @guarded(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """All lengths at which every pool's policy holds, as far as loading pays; a pool that we do not keep lets none
        be restored."""
        binary = key_bytes(keys)
        # A second form of the KV pages (block groups) has a verdict of its own and never gates.
        gates = [t for t in pool_transfers or () if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        if self._tier.anchor_is_logical and not gates:
            return PoolTransferResult(0, {}, [])
        with self._waits.looking_up(len(keys)):
            places = self._tier.locate(PoolName.KV, binary)
            found = {PoolName.KV: places != ABSENT} | {
                each.name: self._tier.locate(each.name, binary) != ABSENT for each in gates
            }
        pages, hits = restorable(found.__getitem__, gates)
        self._stats.looked_up(hits, [each.name for each in gates], len(keys))
        most = self._tier.worth_loading(pages, places)
        return PoolTransferResult(most, hits, [each for each in pages if each <= most])

    @guarded(_pool_misses)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill the pages of each pool, all within one deadline."""
        deadline = time.monotonic() + READ_SECONDS
        return {t.name: self._get(t.name, t.keys or [], t.host_indices, deadline) for t in transfers}

    @guarded(_pool_misses)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store the pages of each pool, all within one deadline."""
        deadline, depth = self._patience(), _depth(extra_info)
        return {t.name: self._put(t.name, t.keys or [], t.host_indices, deadline, depth) for t in transfers}

    @guarded(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether the page or tensor is there."""
        return bool(self._tier.lookup(PoolName.KV, key_bytes([key]))[0])

    @guarded(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The tensor that was set, in `target_location` if one is given."""
        return self._tier.flat.get([key], [target_location], time.monotonic() + READ_SECONDS)[0]

    @guarded(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a tensor of any shape, dtype and stride."""
        return self._tier.flat.put([key], [value], time.monotonic() + WRITE_SECONDS)[0]

    @guarded(_no_tensors)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """One tensor or None for each key."""
        return self._tier.flat.get(keys, target_locations or [None] * len(keys), time.monotonic() + READ_SECONDS)

    @guarded(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """True when every tensor was stored or accepted."""
        return all(self._tier.flat.put(keys, values or [None] * len(keys), time.monotonic() + WRITE_SECONDS))

    @guarded(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove what the namespaces of this backend hold; other models' objects in the store stay."""
        logger.info("tutti: cleared %d objects", self._tier.clear())
        return True

    def get_stats(self) -> StorageMetrics:
        """What was moved since the last call. Asked in every iteration of the scheduler: O(1), cannot raise."""
        return self._stats.drain()

    def close(self) -> None:
        """Let no call in, wait for those inside, write what was accepted. Idempotent; ends within 10 s."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        if not self._calls.shut(CLOSE_SECONDS / 3):
            logger.warning("tutti: calls are still running while the store is closed")
        if not self._tier.close(deadline - time.monotonic()):
            logger.warning("tutti: some accepted pages could not be written in time and are lost")

    def suspend(self, reason: str) -> None:
        """Neither read nor write until the next flush: what SGLang holds now may be of another model."""
        self._calls.shut(0)
        if not self._suspended:
            self._suspended = True
            logger.warning("tutti: %s: the tier is off until the cache is flushed", reason)

    def flushed(self) -> None:
        """SGLang has dropped its cache: write what was accepted or, after new weights, go on under a new identity."""
        if not self._suspended:
            self._tier.store.drain(WRITE_SECONDS)
            self._tier.timing.save()
        else:
            self._tier.renew()
            self._suspended = False
            self._calls.open()
            logger.info("tutti: the tier is on again, with new weights")

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks of a server, named for people."""
        return self._tier.facts()

    def place(self) -> Place:
        """What the other ranks must know to choose who writes what all of them hold."""
        return self._tier.place()

    def let_write(self) -> None:
        """Write replicated KV, although SGLang chose another rank."""
        self._tier.writes_replicas = True

    def keeps_shards(self, name: str) -> bool:
        """Whether each TP rank must write its own pages of a pool, also where one rank writes the KV (a draft of a
        model with replicated KV): SGLang asks for no others."""
        return self._tier.keeps_shards(name)

    def _patience(self) -> float:
        """Deadline of a put. While the drives do not keep up, SGLang's queue would pin more and more host rows behind
        puts that wait and are refused in the end: then only what there is room for at once is taken."""
        return time.monotonic() + (CROWDED_SECONDS if self._crowded else WRITE_SECONDS)

    def _get(self, name: str, keys: list[str], indices: torch.Tensor | None, deadline: float) -> list[bool]:
        start = time.monotonic()
        self._tier.store.take_received()
        with self._waits.reading(len(keys)):
            got = self._tier.get(name, key_bytes(keys), indices, deadline)
        seconds = time.monotonic() - start
        if name == PoolName.KV:
            self._tier.moved(len(keys) * self._tier.page_bytes(name) if got.all() else 0, seconds)
        self._stats.answered(name, "get", got)
        count = int(got.sum())
        self._stats.moved("prefetch", count, count * self._tier.page_bytes(name), seconds)
        return _bools(got)

    def _put(self, name: str, keys: list[str], indices: torch.Tensor | None, deadline: float, depth: int) -> list[bool]:
        start = time.monotonic()
        self._tier.store.take_accepted()
        done = self._tier.put(name, key_bytes(keys), indices, deadline, depth)
        self._stats.answered(name, "put", done)
        if new := self._tier.store.take_accepted():
            self._stats.moved("backup", -(-new // self._tier.page_bytes(name)), new, time.monotonic() - start)
        self._crowded = not done.all() and time.monotonic() >= deadline
        return _bools(done)


def _depth(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """Of the first key in its prefix, where SGLang says it (hicache_storage_pass_prefix_keys)."""
    return len(extra_info.prefix_keys or ()) if extra_info else 0


def _bools(found: Found) -> list[bool]:
    answers: list[bool] = found.tolist()  # SGLang calls list.index on it (hicache_storage.py:201)
    return answers
