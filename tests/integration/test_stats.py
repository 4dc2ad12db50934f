"""What SGLang's metrics and ours are told."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.observability.metrics_collector import StorageMetrics

from tutti_sglang.integration.stats import KEPT, Stats
from tutti_sglang.metrics import Metrics


def _moved(stats: Stats, pages: int = 2, missed: int = 0) -> None:
    stats.answered("kv", "get", np.array([True] * pages + [False] * missed))
    stats.moved("prefetch", pages, pages << 20, 0.5)


def test_the_lists_are_empty_once_they_were_taken() -> None:
    stats = Stats(Metrics(CollectorRegistry()), metered=True)
    _moved(stats, 3, 1)
    stats.moved("backup", 1, 5 * 10**8, 0.5)
    taken = stats.drain()
    assert (taken.prefetch_pgs, taken.backup_pgs, taken.backup_bandwidth) == ([3], [1], [1.0])
    assert stats.drain() == StorageMetrics()


def test_the_lists_do_not_grow_where_nobody_takes_them() -> None:
    unasked, asked = (Stats(Metrics(CollectorRegistry()), metered=metered) for metered in (False, True))
    for _ in range(KEPT + 10):
        _moved(unasked)
        _moved(asked)
    assert unasked.drain() == StorageMetrics()
    lists = asked.drain()
    assert len(lists.prefetch_pgs) == len(lists.prefetch_bandwidth) == KEPT


def test_each_pool_is_counted_for_itself() -> None:
    metrics = Metrics(CollectorRegistry())
    stats = Stats(metrics, metered=False)
    _moved(stats, 3, 2)
    stats.looked_up({"kv": 5, "swa": 1}, ["swa", "mamba"], 7)

    def pages(**labels: str) -> float:
        return metrics.value("tutti_pool_pages", **labels)

    assert (pages(pool="kv", op="get", outcome="yes"), pages(pool="kv", op="get", outcome="no")) == (3, 2)
    assert (pages(pool="swa", op="lookup", outcome="yes"), pages(pool="swa", op="lookup", outcome="no")) == (1, 4)
    assert (pages(pool="kv", op="lookup", outcome="yes"), pages(pool="kv", op="lookup", outcome="no")) == (5, 2)
    assert [metrics.value("tutti_withheld_pages", pool=pool) for pool in ("swa", "mamba", "kv")] == [4, 5, 0]
