"""LOAD: nothing grows without end, nothing waits without end."""

import gc
import logging
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.kit import MIB, Pages, Weather, close_good, keys, namespace, open_store, soon, store_pages
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, Fault, FaultPlan

LARGE = (128 << 10, 128 << 10)


def test_many_reads_share_staging_for_four_pages_and_all_end(disk: Path) -> None:
    """B109: elsewhere readers tried for ever to get a buffer."""
    store = open_store(disk, staging_size=MIB)
    ns = store.attach(namespace(tensors=LARGE))
    for start in range(0, 8, 2):
        store_pages(store, ns, start, start + 1, tensors=LARGE)
    answers: list[Any] = []

    def read() -> None:
        pages = Pages(8, LARGE).wipe()
        found = store.get(ns, keys(*range(8)), pages.rows, soon(60))
        answers.append([found[place] and pages.holds(place, place) for place in range(8)])

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == [[True] * 8] * 16
    assert store._parts.staging.used == 0
    close_good(store)


def test_all_pools_of_a_call_share_one_deadline(
    opened: Callable[..., Any], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B111: elsewhere the time limit did not count while a side pool was being read."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    from tests.integration.host_pools import fill, mha_pool, slots
    from tests.regressions.test_key import keys as names
    from tutti_sglang.integration import hicache
    from tutti_sglang.store import opening

    weather = Weather()
    engine = ThreadsEngine(2 * MIB, 4, MIB, weather)
    monkeypatch.setattr(opening, "create_engine", lambda *_: (engine, "with weather"))
    monkeypatch.setattr(hicache, "READ_SECONDS", 1.0)
    pool, side = mha_pool(), mha_pool("page_first", heads=2)
    fill(pool, 1)
    fill(side, 2)
    backend = opened(pool)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    transfers = [
        PoolTransfer(PoolName.KV, slots(pool, [0, 1]), keys=names(2)),
        PoolTransfer(PoolName.SWA, slots(side, [0, 1]), keys=names(2)),
        PoolTransfer(PoolName.KV, slots(pool, [0, 1]), keys=names(2)),
    ]
    assert backend.batch_set_v2(transfers[:2]) == {PoolName.KV: [True] * 2, PoolName.SWA: [True] * 2}
    backend.flushed()
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=READS, begin=2 * 2 * MIB)
    began = time.monotonic()
    got = backend.batch_get_v2([transfers[0], transfers[1], transfers[1], transfers[1]])
    assert got == {PoolName.KV: [True] * 2, PoolName.SWA: [False] * 2}
    assert time.monotonic() - began < 8, "each call had a second of its own, or more"
    weather.plan.gate.open()


def test_nothing_of_a_call_is_kept(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """B114: elsewhere small views kept large arrays alive, and memory grew for hours."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps every record
    from tests.integration.host_pools import fill, mha_pool, slots
    from tests.regressions.test_key import keys as names

    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)

    def rounds(count: int) -> weakref.ref[Any]:
        for _ in range(count):
            indices = slots(pool, [0, 1, 2, 3])
            backend.batch_set_v1(names(4), indices)
            backend.batch_exists(names(8))
            backend.batch_get_v1(names(4), indices)
            backend.flushed()
            backend.clear()
            backend.get_stats()
        return weakref.ref(indices)

    def kept() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    rounds(15)
    tracemalloc.start()
    rounds(5)
    growth = []
    for _ in range(3):  # what other threads allocate meanwhile is in one window; a leak is in all of them
        before = kept()
        last = rounds(20)
        growth.append(kept() - before)
    tracemalloc.stop()
    assert last() is None
    assert min(growth) < 20 * 1024, f"more than a KiB stays of each round: {growth}"


def test_hidden_and_condemned_objects_are_bounded(disk: Path) -> None:
    """B115: elsewhere each request that was given up kept a share of a budget, until none was left."""
    weather = Weather()
    store = open_store(disk, seam=weather, staging_size=MIB)
    ns = store.attach(namespace(tensors=LARGE))
    store_pages(store, ns, 0, 1, tensors=LARGE)
    pages = Pages(2, LARGE)
    for _ in range(20):
        weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=READS)
        assert not store.get(ns, keys(0, 1), pages.rows, soon(0.02)).any()
        weather.plan.gate.open()
        for health in (store._parts.drives[0].reads, store._parts.drives[0].writes):
            health.tried(True)
    weather.plan = None
    deadline = soon(30)
    while store._parts.staging.used and time.monotonic() < deadline:
        extent = store._parts.staging.acquire(4096)
        if extent:
            store._parts.staging.release(extent)
    assert store._parts.staging.used == 0
    assert np.all(store.get(ns, keys(0, 1), pages.rows, soon()))
    close_good(store)
