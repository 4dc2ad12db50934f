"""The writer starts when the gate lets it, at once when somebody waits, and never later than its deadline."""

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.store.kit import close_good, eventually, get, namespace, open_store, put, value
from tutti_sglang.engine import turns, window
from tutti_sglang.store import ObjectStore

FOREVER = 1 << 62


class Busy:
    """A scheduler that lets writes start until `until`, heard every few milliseconds."""

    def __init__(self, store: ObjectStore) -> None:
        self.until = 0
        self._window, self._stop = store._parts.window, Event()
        self._window.hear(1, 0)
        self._thread = Thread(target=self._tell)
        self._thread.start()

    def _tell(self) -> None:
        while not self._stop.wait(0.005):
            self._window.hear(1, self.until)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def store(disk: Path) -> Iterator[ObjectStore]:
    opened = open_store(disk)
    yield opened
    opened.close()


@pytest.fixture
def busy(store: ObjectStore) -> Iterator[Busy]:
    scheduler = Busy(store)
    yield scheduler
    scheduler.end()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be slow: what takes longer than 100 ms is no reason to mix here."""
    for module in (turns, window):
        monkeypatch.setattr(module, "PATIENCE", 60 * 10**9)


def _written(store: ObjectStore) -> float:
    return value(store, "tutti_put_objects", outcome="written")


def test_pages_wait_in_memory_while_compute_is_not_to_be_disturbed(store: ObjectStore, busy: Busy) -> None:
    ns = store.attach(namespace())
    assert all(put(store, ns, 1, 2, 3))
    time.sleep(0.3)
    assert _written(store) == 0
    assert get(store, ns, 1, 2, 3) == [True] * 3
    busy.until = FOREVER
    assert eventually(lambda: _written(store) == 3)
    assert value(store, "tutti_write_wait_seconds", reason="compute") > 0
    assert value(store, "tutti_write_turns", reason="window") > 0


def test_whoever_waits_for_the_writes_gets_them_at_once(store: ObjectStore, busy: Busy) -> None:
    ns = store.attach(namespace())
    assert all(put(store, ns, 1, 2, 3))
    assert store.drain(8)
    assert _written(store) == 3
    assert value(store, "tutti_write_turns", reason="waited for") > 0
    assert all(put(store, ns, 4))
    assert store.close()
    assert _written(store) == 4


def test_full_staging_is_emptied_whatever_the_scheduler_does(store: ObjectStore, busy: Busy) -> None:
    ns = store.attach(namespace())
    for first in range(0, 400, 100):  # 10 MiB of pages, 8 MiB of staging
        assert all(put(store, ns, *range(first, first + 100)))
    assert value(store, "tutti_write_turns", reason="waited for") > 0


def test_a_page_waits_no_longer_than_its_deadline(
    store: ObjectStore, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "LATE", 0.2)
    ns = store.attach(namespace())
    assert all(put(store, ns, 1, 2, 3))
    assert eventually(lambda: _written(store) == 3)
    assert value(store, "tutti_write_turns", reason="late") > 0


def test_a_scheduler_that_fell_silent_holds_nothing_up(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LATE", 1000.0)
    ns = store.attach(namespace())
    store._parts.window.hear(1, 0)
    assert all(put(store, ns, 1, 2, 3))
    assert eventually(lambda: _written(store) == 3)


def test_reads_and_writes_of_many_threads_leave_a_good_store_and_do_not_meet(disk: Path, patient: None) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    stop = Event()

    def read() -> None:
        while not stop.is_set():
            assert all(get(store, ns, *range(20)))

    readers = [Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in range(100, 200, 10):
        assert all(put(store, ns, *range(first, first + 10)))
    assert store.drain(8)
    stop.set()
    for reader in readers:
        reader.join()
    assert value(store, "tutti_overlap_seconds") == 0
    close_good(store)


def test_a_read_does_not_wait_while_the_index_is_written(
    disk: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    publish, begun, go_on = store._parts.index.publish, Event(), Event()

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return publish(*args)

    monkeypatch.setattr(store._parts.index, "publish", slowly)
    assert all(put(store, ns, 100))
    assert begun.wait(60)
    assert all(get(store, ns, *range(20)))
    go_on.set()
    close_good(store)


def test_off_nothing_waits(disk: Path) -> None:
    store = open_store(disk, windows="off")
    ns = store.attach(namespace())
    store._parts.window.hear(1, 0)
    assert all(put(store, ns, 1, 2, 3))
    assert eventually(lambda: _written(store) == 3)
    assert value(store, "tutti_write_turns") == 0
    assert store.close()
