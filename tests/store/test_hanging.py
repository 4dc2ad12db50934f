"""File systems that do not answer, really: calls block in the kernel. The other drives go on, and so do flush and
detach."""

import contextlib
import ctypes
import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kit import MIB, eventually, get, lookup, namespace, open_store, put, store_pages, value
from tutti_sglang.errors import StoreError
from tutti_sglang.store import ObjectStore, drives, growth, objects, opening, schema, segments, writer

BACK = 60.0
"""Seconds after which a file system thaws whatever becomes of the test."""


@contextlib.contextmanager
def unanswered(path: Path) -> Iterator[None]:
    """Mount a FUSE file system over it whose daemon never says a word: whoever looks a path up there waits."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC) if os.access("/dev/fuse", os.W_OK) else -1
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if fd < 0 or libc.mount(b"tutti-test", os.fsencode(path), b"fuse", 6, options):
        pytest.skip("no FUSE here, or not allowed to mount")
    try:
        yield
    finally:
        os.close(fd)  # all who wait get ENOTCONN
        libc.umount2(os.fsencode(path), 2)


@contextlib.contextmanager
def frozen(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Freeze it: whoever changes anything there waits in the kernel, where no signal reaches him. → what thaws it when
    all else failed."""
    thaw = subprocess.Popen(["sh", "-c", f"sleep {BACK}; fsfreeze -u {path}"], stderr=subprocess.DEVNULL)
    subprocess.run(["fsfreeze", "-f", path], check=True)
    try:
        yield thaw
    finally:
        subprocess.run(["fsfreeze", "-u", path], check=True)
        thaw.kill()
        thaw.wait()


@pytest.fixture
def mounted(disk: Path) -> Iterator[Path]:
    """A file system of its own."""
    image, path = disk / "image", disk / "mounted"
    path.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, path], capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount, or no loop devices")
    (path / "drive").mkdir()
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second instead of twenty."""
    for module, name in (
        (growth, "DATA_SECONDS"),
        (segments, "DATA_SECONDS"),
        (writer, "WRITE_SECONDS"),
        (drives, "OPEN_SECONDS"),
        (opening, "OPEN_SECONDS"),
        (objects, "CLEAR_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 1.0)
    monkeypatch.setattr(drives.Drive.ask, "__defaults__", (0.5, None))


def in_service(store: ObjectStore) -> int:
    return store.stats().drives_in_service


def stored(store: ObjectStore, ns: int, first: int) -> bool:
    """Whether twenty new pages get to the drives."""
    put(store, ns, *range(first, first + 20))
    assert store.drain(9)
    return all(get(store, ns, *range(first, first + 20)))


def test_a_drive_whose_path_is_not_answered_stops_nobody_and_returns(disk: Path) -> None:
    store = open_store(disk / "a", disk / "b")
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with unanswered(disk / "b"):
        assert eventually(lambda: in_service(store) == 1)
        assert eventually(lambda: stored(store, ns, 100))
    assert eventually(lambda: in_service(store) == 2)
    assert eventually(lambda: all(get(store, ns, *range(20))))
    assert store.close()


def test_a_store_closes_while_a_path_is_not_answered(disk: Path) -> None:
    store = open_store(disk / "a", disk / "b")
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with unanswered(disk / "b"):
        assert eventually(lambda: in_service(store) == 1)
        assert store.close()
    store = open_store(disk / "a", disk / "b")
    assert all(get(store, store.attach(namespace()), *range(20)))
    assert store.close()


@pytest.mark.parametrize(("fsync", "pages"), [("none", 0), ("none", 20), ("batch", 20)])
def test_a_frozen_drive_stops_nobody_and_returns(disk: Path, mounted: Path, fsync: str, pages: int) -> None:
    """Its first segment, writes, syncs and unlinks wait in the kernel."""
    store = open_store(disk / "a", mounted / "drive", fsync=fsync, max_size=16 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(pages))
    with frozen(mounted):
        firsts = iter(range(1000, 9000, 20))
        assert eventually(lambda: stored(store, ns, next(firsts))), "the other drive takes what comes"
        store.clear(ns)
        assert eventually(lambda: stored(store, ns, next(firsts)))
        assert not pages or not store.close(1.0), "it still owes an answer"
    assert eventually(lambda: store.close(1.0))
    store = open_store(disk / "a", mounted / "drive", max_size=16 * MIB)
    report = store.verify(repair=True)
    assert (report.lost, report.double, report.damaged) == (0, 0, 0)
    store_pages(store, store.attach(namespace()), *range(20))
    assert store.verify().good
    assert value(store, "tutti_call_errors") == 0
    assert store.close()


def test_a_store_opens_without_a_drive_that_is_not_answered(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(disk / "a", disk / "b")
    store_pages(store, store.attach(namespace()), *range(20))
    assert store.close()
    with unanswered(disk / "b"):
        store = open_store(disk / "a", disk / "b")
        assert f"{disk / 'b'} is left out: its file system does not answer" in caplog.text
        ns = store.attach(namespace())
        assert not any(get(store, ns, *range(20)))
        store_pages(store, ns, *range(100, 120))
        assert all(get(store, ns, *range(100, 120)))
        assert store.close()
    store = open_store(disk / "a", disk / "b")
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(20), *range(100, 120)))
    assert store.verify().good
    assert store.close()


def test_without_any_answer_opening_ends_and_says_what_to_look_at(disk: Path) -> None:
    store = open_store(disk / "a", index_dir=str(disk / "index"))
    store_pages(store, store.attach(namespace()), *range(20))
    assert store.close()
    for silent, words in (("a", "None of storage_dirs can be used"), ("index", "The index directory")):
        with unanswered(disk / silent):
            with pytest.raises(StoreError, match=f"{words}.*{disk / silent}.*does not answer|did not answer") as error:
                open_store(disk / "a", index_dir=str(disk / "index"))
            assert f"grep {disk / silent} /proc/self/mounts" in str(error.value)
    store = open_store(disk / "a", index_dir=str(disk / "index"))
    assert all(get(store, store.attach(namespace()), *range(20)))
    assert store.close()


def test_an_index_that_is_frozen_while_serving_hangs_no_call(disk: Path, mounted: Path) -> None:
    """Whatever wants to write to it waits in the kernel: a publish, a clear, a reader that says what it reads."""
    store = open_store(disk / "a", index_dir=str(mounted / "drive"))
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with frozen(mounted) as thaw:
        assert all(lookup(store, ns, *range(20))), "it can still be read"
        put(store, ns, *range(100, 120))
        assert not store.drain(1.5)
        for call in range(4):
            get(store, ns, *range(20), *range(200, 210))
            assert len(lookup(store, ns, *range(20))) == 20
            put(store, ns, 300 + call)
        store.clear(ns)
        with pytest.raises(StoreError, match="index"):
            store.attach(namespace("another"))
        assert value(store, "tutti_index_errors", op="timeout") > 0
        assert not store.close(0.5)
        assert thaw.poll() is None, "somebody waited for the end of it"
    assert eventually(lambda: store.close(1.0))
    assert value(store, "tutti_call_errors") == 0
    store = open_store(disk / "a", index_dir=str(mounted / "drive"))
    report = store.verify(repair=True)
    assert (report.lost, report.double, report.damaged) == (0, 0, 0)
    store_pages(store, store.attach(namespace()), *range(20))
    assert store.close()


def test_an_index_that_thaws_serves_again(disk: Path, mounted: Path) -> None:
    store = open_store(disk / "a", index_dir=str(mounted / "drive"))
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with frozen(mounted):
        put(store, ns, *range(100, 120))
        assert not store.drain(1.5)
        get(store, ns, *range(20))
    assert eventually(lambda: all(get(store, ns, *range(20), *range(100, 120))))
    assert eventually(lambda: stored(store, ns, 200))
    assert store.verify().good
    assert store.close()


def test_an_index_whose_pages_do_not_come_is_misses_until_they_do(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comes, connect = threading.Event(), schema.connect

    def gated(path: Path, timeout: float) -> sqlite3.Connection:
        connection = connect(path, timeout)
        if timeout == schema.READ_TIMEOUT:
            connection.set_progress_handler(lambda: not comes.wait(30), 1)
        return connection

    monkeypatch.setattr(schema, "connect", gated)
    comes.set()
    store = open_store(disk / "a")
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    comes.clear()
    assert not any(get(store, ns, *range(20)))
    assert not any(lookup(store, ns, *range(20))), "while it owes an answer, nobody asks"
    assert value(store, "tutti_index_errors", op="timeout") >= 2
    comes.set()
    assert eventually(lambda: all(lookup(store, ns, *range(20))))
    assert all(get(store, ns, *range(20)))
    assert store.close()
