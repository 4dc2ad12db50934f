"""What the backend tells SGLang's metrics and ours: how many pages of which pool came and went, and how fast."""

from collections.abc import Iterable, Mapping

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

from tutti_sglang.integration.stored import Found
from tutti_sglang.metrics import Metrics

KEPT = 4096
"""Entries of a list at most: nobody drains them where SGLang's scheduler loop does not run."""


class Stats:
    """Thread safe as far as SGLang needs: an entry may be lost while the lists are taken, none counts twice.

    `metered`: whether SGLang asks for its lists.
    """

    def __init__(self, metrics: Metrics, *, metered: bool) -> None:
        self._metrics = metrics
        self._metered = metered
        self._lists = StorageMetrics()

    def drain(self) -> StorageMetrics:
        """What was moved since the last call; the lists are empty then. O(1), cannot raise."""
        lists, self._lists = self._lists, StorageMetrics()
        return lists

    def looked_up(self, hits: Mapping[str, int], sides: Iterable[str], asked: int) -> None:
        """A lookup of `asked` pages: how many of them the KV pool lets be restored, and of those each side pool. What
        a pool does not let be restored of a stored prefix, it withholds."""
        stored = hits.get(PoolName.KV, 0)
        self._count(PoolName.KV, "lookup", stored, asked - stored)
        for name in sides:
            longest = hits.get(name, 0)
            self._count(name, "lookup", longest, stored - longest)
            self._metrics.add("tutti_withheld_pages", stored - longest, pool=str(name))

    def answered(self, pool: str, call: str, done: Found) -> None:
        """A "get" or a "put" of pages."""
        count = int(done.sum())
        self._count(pool, call, count, len(done) - count)

    def moved(self, way: str, count: int, nbytes: int, seconds: float) -> None:
        """So many pages came ("prefetch") or went ("backup"), those left out that were here already."""
        pages: list[int] = getattr(self._lists, f"{way}_pgs")
        speeds: list[float] = getattr(self._lists, f"{way}_bandwidth")
        if self._metered and nbytes and len(speeds) < KEPT:
            pages.append(count)
            speeds.append(nbytes / 1e9 / max(seconds, 1e-9))

    def _count(self, pool: str, call: str, good: int, bad: int) -> None:
        self._metrics.add("tutti_pool_pages", good, pool=str(pool), op=call, outcome="yes")
        self._metrics.add("tutti_pool_pages", bad, pool=str(pool), op=call, outcome="no")
