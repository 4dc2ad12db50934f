"""A put keeps what is there and replaces what cannot be read, but never gives up the one before it has the other."""

from pathlib import Path

import pytest

from tests.store.kit import (
    MIB,
    Pages,
    Weather,
    close_good,
    eventually,
    get,
    keys,
    lookup,
    namespace,
    open_store,
    put,
    soon,
    store_pages,
    value,
)
from tutti_sglang.store import ObjectStore, doubts, health, writer
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, WRITES, Fault, FaultPlan


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(doubts, "HIDDEN_SECONDS", 1.0)
    monkeypatch.setattr(writer, "TICK_SECONDS", 0.02)


def _out_of_service(store: ObjectStore, ns: int) -> bool:
    """Ask until the drive serves neither reads nor writes."""
    get(store, ns, *range(20))
    put(store, ns, 500)
    drive = store._parts.drives[0]
    return not drive.reads.in_service and not drive.writes.in_service


def test_a_put_that_no_drive_can_take_deletes_nothing(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK})
    assert eventually(lambda: _out_of_service(store, ns))
    for _ in range(5):
        assert not any(put(store, ns, *range(20))), "no drive takes it, and none can be read"
    assert not store._parts.doubts.condemned()
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 1)
    assert eventually(lambda: all(lookup(store, ns, *range(20))))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_put_that_finds_no_staging_deletes_nothing(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather, staging_size=MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(3))
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=READS)
    assert not any(get(store, ns, *range(3)))
    assert store.stats().drives_in_service == 1, "unreadable for the moment, and hidden"
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    filler, again = Pages(60).fill(*range(100, 160)), Pages(3).fill(*range(3))
    assert not store.put(ns, keys(*range(100, 160)), filler.rows, soon(0.1)).all()
    assert not store.put(ns, keys(*range(3)), again.rows, soon(0.1)).any()
    weather.plan.gate.open()
    weather.plan = None
    assert store.drain(8)
    assert eventually(lambda: all(get(store, ns, *range(3))))
    close_good(store)


def test_what_cannot_be_read_is_replaced(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(3))
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=READS)
    assert not any(get(store, ns, *range(3)))
    assert all(put(store, ns, *range(3)))
    weather.plan = None
    assert store.drain(8)
    assert value(store, "tutti_put_objects", outcome="written") == 6
    assert all(get(store, ns, *range(3)))
    close_good(store)
