"""A full store makes room: what is used stays, namespaces share, budgets hold."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.kit import (
    MIB,
    SLOTS,
    close_good,
    eventually,
    get,
    lookup,
    namespace,
    open_store,
    put,
    store_pages,
    value,
)
from tutti_sglang.store import ObjectStore, eviction
from tutti_sglang.store.locking import store_lock


def _put(store: ObjectStore, ns: int, start: int, count: int) -> None:
    for first in range(start, start + count, 16):
        put(store, ns, *range(first, first + 16))
        assert store.drain(8)


def _segments(store: ObjectStore) -> dict[int, int]:
    """How many each namespace has."""
    store._parts.segments.refresh()
    owners = [row.namespace for row in store._parts.segments.rows()]
    return {number: owners.count(number) for number in owners}


def test_what_is_read_outlives_many_times_the_capacity(disk: Path) -> None:
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    kept = range(32)
    _put(store, ns, 0, 32)
    for start in range(1000, 1000 + 20 * SLOTS, 2 * SLOTS):
        assert all(get(store, ns, *kept)), f"lost at {start}"
        store._parts.hits.flush()
        _put(store, ns, start, 2 * SLOTS)
    assert all(get(store, ns, *kept))
    assert any(get(store, ns, *range(1000 + 19 * SLOTS, 1000 + 20 * SLOTS))), "what was written last is there"
    assert store._parts.index.usage().segments == 4
    assert value(store, "tutti_evicted_objects") >= 16 * SLOTS
    close_good(store)


def test_a_page_that_is_put_again_counts_as_used(disk: Path) -> None:
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    _put(store, ns, 0, 16)
    for start in range(1000, 1000 + 10 * SLOTS, SLOTS):
        put(store, ns, *range(16))
        store._parts.hits.flush()
        _put(store, ns, start, SLOTS)
    assert all(lookup(store, ns, *range(16)))
    close_good(store)


def test_slots_are_kept_free_above_the_high_watermark(disk: Path) -> None:
    store = open_store(disk, max_size=4 * MIB, low_watermark=0.5, high_watermark=0.75)
    ns = store.attach(namespace())
    _put(store, ns, 0, 4 * SLOTS)
    index = store._parts.index
    assert eventually(lambda: index.usage(ns).used <= 3 * SLOTS)
    assert index.usage(ns).used >= SLOTS
    close_good(store)


def test_a_full_store_loses_no_page_for_want_of_slots_while_others_read(disk: Path) -> None:
    """Eviction by the writer itself is enough: watermarks only save it the trouble."""
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    _put(store, ns, 0, 4 * SLOTS)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            get(store, ns, *range(0, 4 * SLOTS, 3))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for start in range(1000, 1000 + 12 * SLOTS, SLOTS):
            assert all(put(store, ns, *range(start, start + SLOTS)))
        assert store.drain(20)
    finally:
        done.set()
        reader.join()
    assert value(store, "tutti_put_objects", outcome="dropped") == 0
    close_good(store)


def test_a_newcomer_gets_its_share_of_a_full_store_and_no_more(disk: Path) -> None:
    store = open_store(disk, max_size=8 * MIB)
    old, new = store.attach(namespace("old")), store.attach(namespace("new"))
    _put(store, old, 0, 8 * SLOTS)
    assert _segments(store) == {old: 8}
    _put(store, new, 0, 8 * SLOTS)
    assert _segments(store) == {old: 6, new: 2}
    assert sum(lookup(store, old, *range(8 * SLOTS))) > 4 * SLOTS
    assert any(lookup(store, new, *range(7 * SLOTS, 8 * SLOTS)))
    close_good(store)


def test_a_namespace_that_nobody_uses_gives_way(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk, max_size=8 * MIB)
    old, new = store.attach(namespace("old")), store.attach(namespace("new"))
    _put(store, old, 0, 8 * SLOTS)
    store._parts.hits.flush()
    now = time.time() + eviction.IDLE_SECONDS + 1
    monkeypatch.setattr("tutti_sglang.store.registry.time.time", lambda: now)
    _put(store, new, 0, 8 * SLOTS)
    assert _segments(store)[new] == 8
    close_good(store)


def test_a_store_of_one_segment_serves_whoever_writes(disk: Path) -> None:
    store = open_store(disk, max_size=MIB)
    for model in ("a", "b", "a"):
        ns = store.attach(namespace(model))
        _put(store, ns, 0, 16)
        assert all(get(store, ns, *range(16)))
    close_good(store)


def test_a_full_store_goes_on_while_a_stopped_process_holds_its_lock(disk: Path) -> None:
    store = open_store(disk, max_size=2 * MIB)
    ns = store.attach(namespace())
    _put(store, ns, 0, 4 * SLOTS)
    directory = os.open(disk, os.O_RDONLY)
    with store_lock(directory, 0) as held:
        assert held
        for start in range(1000, 1048, 16):
            put(store, ns, *range(start, start + 16))
            assert store.drain(30)
        assert all(get(store, ns, *range(1000, 1048)))
    os.close(directory)
    close_good(store)


def test_what_is_seen_once_is_not_written(disk: Path) -> None:
    store = open_store(disk, write_admission="second")
    ns = store.attach(namespace())
    assert put(store, ns, *range(8)) == [True] * 8
    assert store.drain(8)
    assert not any(lookup(store, ns, *range(8)))
    assert value(store, "tutti_put_objects", outcome="declined") == 8
    put(store, ns, *range(4))
    assert store.drain(8)
    assert lookup(store, ns, *range(8)) == [True] * 4 + [False] * 4
    assert all(get(store, ns, *range(4)))
    close_good(store)


def test_a_spent_budget_stops_writing_and_nothing_else(disk: Path) -> None:
    store = open_store(disk, daily_write_budget=MIB)
    ns = store.attach(namespace())
    _put(store, ns, 0, 4 * SLOTS)
    found = lookup(store, ns, *range(4 * SLOTS))
    assert SLOTS <= sum(found) <= 2 * SLOTS
    assert all(get(store, ns, *[number for number, there in enumerate(found) if there]))
    store.close()
    again = open_store(disk, daily_write_budget=MIB)
    ns = again.attach(namespace())
    again._parts.admission.flush()
    _put(again, ns, 1000, 16)
    assert not any(lookup(again, ns, *range(1000, 1016))), "the day is not over"
    close_good(again)


@given(
    slots=st.integers(1, 12),
    batches=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(["tick", "read", "nothing"])), min_size=1, max_size=8
    ),
)
@settings(max_examples=6)
def test_a_small_store_keeps_what_was_just_written(slots: int, batches: list[tuple[int, str]]) -> None:
    """A batch of up to half of the slots is there as a whole, of a larger one as much as that."""
    disk = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
    size = (MIB // slots // 4096 * 4096,)
    store = open_store(disk, max_size=MIB)
    try:
        ns = store.attach(namespace(tensors=size))
        first = 0
        for count, then in batches:
            count = min(count, slots)
            pages, first = range(first, first + count), first + count
            store_pages(store, ns, *pages, tensors=size)
            if then == "tick":
                store._upkeep._evictor.trim()
            assert sum(lookup(store, ns, *pages)) >= min(count, max(1, slots // 2))
            if then == "read":
                store._parts.pins._claims.clear()  # as if it were long ago
                assert sum(get(store, ns, *pages, tensors=size)) >= min(count, max(1, slots // 2))
                store._parts.hits.flush()
        close_good(store)
    finally:
        shutil.rmtree(disk)
