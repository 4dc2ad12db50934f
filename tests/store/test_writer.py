"""The writer ends every parcel and every slot it was given, whatever fails around it."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import MIB, close_good, eventually, get, lookup, namespace, open_store, put, store_pages, value
from tutti_sglang.engine.batch import Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam
from tutti_sglang.errors import StoreError
from tutti_sglang.store import health, writer

STRIDE = 8192


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(writer, "TICK_SECONDS", 0.02)


def _busy(*_: Any, **__: Any) -> Any:
    raise StoreError("database is locked")


class _OneHangsOneFails(Seam):
    """The write of the first tensor of slot 3 hangs until `gate` opens; that of slot 5 fails once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.waiting, self.failed = 0, False

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        slot, within = divmod(place.drive_offset - MIB, STRIDE)
        if operation is Operation.WRITE and not within and slot == 3:
            self.waiting += 1
            self.gate.wait(60)
            self.waiting -= 1
        if operation is Operation.WRITE and not within and slot == 5 and not self.failed:
            self.failed = True
            return -errno.EIO
        return SYSTEM.transfer(operation, place, iovecs)


def test_a_retry_of_neighbours_does_not_release_what_a_drive_still_owes(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WRITE_SECONDS", 0.3)
    seam = _OneHangsOneFails()
    store = open_store(disk, seam=seam, max_io=STRIDE)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    assert seam.failed
    for _ in range(20):
        put(store, ns, 500)
        assert seam.waiting
        assert store._parts.staging.quarantined > 0, "the drive still reads from this memory"
        assert store._parts.index.usage().leased > 0, "and writes to this slot"
    seam.gate.set()
    assert eventually(lambda: not store._parts.staging.quarantined)
    assert eventually(lambda: store.stats().drives_in_service == 1)
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_namespace_that_finds_no_slots_takes_no_other_down(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    spaces = [store.attach(namespace(model)) for model in "abc"]
    take, go = store._room.take, threading.Event()

    def flaky(space: Any, *rest: Any) -> Any:
        go.wait(10)
        return _busy() if space.id == spaces[0] else take(space, *rest)

    monkeypatch.setattr(store._room, "take", flaky)
    assert all(put(store, spaces[1], 0))
    for ns in spaces:
        assert all(put(store, ns, *range(10, 20)))
    go.set()
    assert store.drain(8), "parcels were forgotten"
    assert [all(get(store, ns, *range(10, 20))) for ns in spaces] == [False, True, True]
    assert value(store, "tutti_put_objects", outcome="dropped") == 10
    assert eventually(lambda: not store._parts.staging.used)
    close_good(store)


@pytest.mark.parametrize("step", ["publish", "sums"])
def test_what_was_accepted_and_cannot_be_published_is_counted_and_frees_its_slots(
    disk: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    with monkeypatch.context() as patch:
        patch.setattr(*{"publish": (store._parts.index, "publish"), "sums": (store._parts.sums, "write")}[step], _busy)
        assert all(put(store, ns, *range(10)))
        assert store.drain(8)
    assert not any(lookup(store, ns, *range(10)))
    assert value(store, "tutti_put_objects", outcome="accepted") == 10
    assert value(store, "tutti_put_objects", outcome="dropped") == 10
    assert value(store, "tutti_put_objects", outcome="written") == 0
    store_pages(store, ns, *range(10))
    store._room.leave()
    assert eventually(lambda: store._parts.index.usage().leased == 0), "a slot was lost"
    close_good(store)


def test_slots_are_freed_although_making_room_for_a_full_disk_failed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Seam):
        def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
            full = operation is Operation.WRITE and place.drive_offset == MIB + 5 * STRIDE
            return -errno.ENOSPC if full else SYSTEM.transfer(operation, place, iovecs)

    store = open_store(disk, seam=Full(), max_io=STRIDE)
    ns = store.attach(namespace())
    monkeypatch.setattr(store._room, "relieve", _busy)
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    assert sum(get(store, ns, *range(20))) == 19
    store._room.leave()
    assert eventually(lambda: store._parts.index.usage().leased == 0)
    close_good(store)
