"""Opening waits for nobody for ever: beside a stopped process a known store serves what it has."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.kit import close_good, eventually, get, lookup, namespace, open_store, put, store_pages
from tutti_sglang.errors import StoreError
from tutti_sglang.store import directory, opening

ROOT = Path(__file__).parents[2]
_WRITER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1] + "/index.db", isolation_level=None)
connection.execute("begin immediate")
connection.execute("update epoch set value = value + 1")
print("in", flush=True)
time.sleep(100)
"""
_LOCKER = """
import os, sys, time
from tutti_sglang.store.locking import store_lock
with store_lock(os.open(sys.argv[1], os.O_RDONLY), 1.0) as held:
    print("in" if held else "out", flush=True)
    time.sleep(100)
"""


@contextmanager
def _stopped(code: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that SIGSTOP met at the worst moment."""
    command = [sys.executable, "-c", code, str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "in\n"
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def known(disk: Path) -> Path:
    """The directory of a store with pages 0 … 19."""
    store = open_store(disk / "store")
    store_pages(store, store.attach(namespace()), *range(20))
    close_good(store)
    return disk / "store"


def test_a_process_stopped_in_a_transaction_costs_at_most_puts(known: Path) -> None:
    with _stopped(_WRITER, known):
        store = open_store(known)
        ns = store.attach(namespace())
        assert all(lookup(store, ns, *range(20)))
        assert all(get(store, ns, *range(20)))
        put(store, ns, 20)
        assert store.drain(8)
        assert lookup(store, ns, 20) == [False]
        assert all(get(store, ns, *range(20)))
    store_pages(store, ns, *range(20, 30))
    assert all(get(store, ns, *range(30)))
    close_good(store)


def test_a_process_stopped_with_the_stores_lock_costs_at_most_puts(
    known: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "LOCK_TIMEOUT", 0.3)
    with _stopped(_LOCKER, known):
        store = open_store(known)
        assert "stopped" in caplog.text
        ns = store.attach(namespace())
        assert all(get(store, ns, *range(20)))
        put(store, ns, *range(20, 60))
        assert store.drain(8)
        with pytest.raises(StoreError, match="no drive can join") as caught:
            open_store(known, known.parent / "another")
        assert "ps " in caught.value.hint
    store_pages(store, ns, *range(20, 60))
    assert all(get(store, ns, *range(60)))
    close_good(store)
    store = open_store(known, known.parent / "another")
    assert eventually(lambda: store.stats().drives == 2)
    close_good(store)


def test_a_store_that_cannot_be_opened_leaves_no_thread(disk: Path) -> None:
    (disk / "file").write_text("no directory")
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(StoreError, match="not a directory"):
        open_store(disk / "file", index_dir=str(disk / "index"))
    assert {thread.name for thread in threading.enumerate()} == before


def test_ranks_that_make_a_directory_at_the_same_moment_all_open_the_store(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks sees no directory, and when he makes it, it is there."""
    stores, real = [open_store(disk / "store")], os.path.lexists
    monkeypatch.setattr(directory.os.path, "lexists", lambda path: real(path) and Path(path) != disk / "store")
    stores.append(open_store(disk / "store"))
    ns = [store.attach(namespace()) for store in stores]
    store_pages(stores[0], ns[0], *range(4))
    assert all(get(stores[1], ns[1], *range(4)))
    assert all(store.close() for store in stores)


def test_what_is_no_directory_is_refused_however_it_came_there(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "store").write_bytes(b"x")
    monkeypatch.setattr(directory.os.path, "lexists", lambda path: False)
    with pytest.raises(StoreError, match="store"):
        open_store(disk / "store")
