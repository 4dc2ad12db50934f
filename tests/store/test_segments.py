"""Segment files are opened for who needs them, and a file that cannot be opened costs nobody else anything."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import (
    SLOTS,
    Pages,
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
from tutti_sglang.store import ObjectStore, opener, segments
from tutti_sglang.store.drives import Drive


class _Hanging:
    """open(2) of segment 1 does not return until `gate` opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.waiting = threading.Event(), 0
        self._open = segments.open_file
        monkeypatch.setattr(segments, "open_file", self)

    def __call__(self, drive: Drive, name: str) -> int:
        if name == segments.file_name(1):
            self.waiting += 1
            self.gate.wait(60)
        return self._open(drive, name)


def _reopened(disk: Path) -> tuple[ObjectStore, int]:
    """A store with pages 0 … 39, the first SLOTS of them in segment 1, none of its files open."""
    store = open_store(disk)
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)
    store = open_store(disk)
    return store, store.attach(namespace())


def test_a_file_that_does_not_open_holds_up_nobody_else(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ns = _reopened(disk)
    monkeypatch.setattr(opener, "OPEN_SECONDS", 0.5)
    hanging = _Hanging(monkeypatch)
    pages, answers = Pages(SLOTS), []
    reader = threading.Thread(target=lambda: answers.append(store.get(ns, keys(*range(SLOTS)), pages.rows, soon(9))))
    reader.start()
    assert eventually(lambda: hanging.waiting)
    assert all(get(store, ns, *range(SLOTS, 40))), "of another segment"
    assert all(lookup(store, ns, *range(SLOTS, 40)))
    assert all(put(store, ns, *range(100, 110)))
    assert store.drain(8)
    reader.join(30)
    assert [answer.any() for answer in answers] == [False], "waited for the file system, not for ever"
    for _ in range(20):
        assert not any(get(store, ns, *range(SLOTS)))
    assert hanging.waiting == 1, "one thread waits, whoever asks"
    hanging.gate.set()
    store._parts.doubts._hidden.clear()
    assert eventually(lambda: all(get(store, ns, *range(SLOTS))))
    close_good(store)


def test_a_get_does_not_wait_for_a_file_beyond_its_deadline(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not take it for lost: it may open a moment later."""
    store, ns = _reopened(disk)
    monkeypatch.setattr(opener, "OPEN_SECONDS", 300.0)
    hanging = _Hanging(monkeypatch)
    pages = Pages(SLOTS)
    assert not store.get(ns, keys(*range(SLOTS)), pages.rows, soon(0.05)).any()
    assert value(store, "tutti_missed_objects", reason="deadline") == SLOTS
    hanging.gate.set()
    assert eventually(lambda: all(get(store, ns, *range(SLOTS))))
    close_good(store)


def test_a_file_that_opens_after_the_store_was_closed_is_closed_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store, ns = _reopened(disk)
    monkeypatch.setattr(opener, "OPEN_SECONDS", 0.1)
    hanging = _Hanging(monkeypatch)
    assert not any(get(store, ns, *range(SLOTS)))
    assert store.close()
    hanging.gate.set()
    assert eventually(lambda: not any(each.name == "tutti-open" for each in threading.enumerate()))
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_files_are_opened_once_for_many_threads(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ns = _reopened(disk)
    monkeypatch.setattr(opener, "OPEN_SECONDS", 60.0)
    opened: list[str] = []
    real = segments.open_file

    def record(drive: Drive, name: str) -> int:
        opened.append(name)
        time.sleep(0.05)
        return real(drive, name)

    monkeypatch.setattr(segments, "open_file", record)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(get(store, ns, *range(40)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found)
    assert sorted(opened) == [segments.file_name(1), segments.file_name(2)]
    close_good(store)
