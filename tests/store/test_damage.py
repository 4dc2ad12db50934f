"""What happens to files behind the store's back: bytes changed, files cut, deleted, copied. A miss, counted, and healed
by the next put; never wrong bytes."""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.store.kit import (
    MIB,
    SLOTS,
    TENSORS,
    Weather,
    close_good,
    eventually,
    get,
    lookup,
    namespace,
    open_store,
    put,
    segment_files,
    store_pages,
    value,
)
from tutti_sglang.errors import ForeignStoreError, StoreError
from tutti_sglang.store import ObjectStore
from tutti_sglang.store import segments as segments_module
from tutti_sglang.store.index import Index
from tutti_sglang.testing.faults import EVERY_BLOCK, WRITES, Fault, FaultPlan

STRIDE = 8192
"""Tensor 0 of slot s lies at s * STRIDE in the file of a store with one drive, all 32 of a group side by side."""


def flip(file: Path) -> int:
    """One bit of the first tensor of slot 3."""
    _edit(file, 3 * STRIDE + 1000, lambda data: bytes([data[0] ^ 4]), 1)
    return 1


def swap(file: Path) -> int:
    """The first tensors of slots 3 and 4, whole."""
    with open(file, "r+b") as handle:
        handle.seek(3 * STRIDE)
        data = handle.read(2 * STRIDE)
        handle.seek(3 * STRIDE)
        handle.write(data[STRIDE:] + data[:STRIDE])
    return 2


def zero(file: Path) -> int:
    """The last block of the first tensor of slot 3."""
    _edit(file, 4 * STRIDE - 4096, lambda _: bytes(4096), 4096)
    return 1


def tear(file: Path) -> int:
    """A sector of the first tensor of slot 3 is what it was before the write."""
    _edit(file, 3 * STRIDE + 512, lambda _: os.urandom(512), 512)
    return 1


def repeat(file: Path) -> int:
    """The first block of slot 3 stands where its second should be."""
    _edit(file, 3 * STRIDE, lambda data: 2 * data[:4096], STRIDE)
    return 1


def _edit(file: Path, at: int, change: Callable[[bytes], bytes], size: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(at)
        data = handle.read(size)
        handle.seek(at)
        handle.write(change(data))


def filled(disk: Path, pages: int = 20, **changes: object) -> tuple[ObjectStore, int]:
    """A store with pages 0 … pages - 1 on its drives."""
    store = open_store(disk, **changes)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(pages))
    return store, ns


@pytest.mark.parametrize("damage", [flip, swap, zero, tear, repeat])
def test_spoiled_bytes_are_a_counted_miss_and_healed_by_the_next_put(disk: Path, damage: Callable[[Path], int]) -> None:
    store, ns = filled(disk)
    spoiled = damage(segment_files(disk)[0])
    assert store.verify().damaged == spoiled
    assert sum(get(store, ns, *range(20))) == 20 - spoiled
    assert value(store, "tutti_missed_objects", reason="checksum") == spoiled
    assert sum(lookup(store, ns, *range(20))) == 20 - spoiled, "what could not be read is claimed again"
    assert value(store, "tutti_io_errors") == 0, "the drive is innocent"
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_verify_removes_what_is_spoiled(disk: Path) -> None:
    store, ns = filled(disk)
    flip(segment_files(disk)[0])
    report = store.verify(repair=True)
    assert (report.objects, report.damaged, report.repaired) == (20, 1, 1)
    assert len(report.problems) == 1
    assert sum(lookup(store, ns, *range(20))) == 19
    close_good(store)


def test_verify_makes_rows_of_checksums_again(disk: Path) -> None:
    store, ns = filled(disk)
    (file,) = (disk / "sums").glob("*.sum")
    file.write_bytes(file.read_bytes()[: 10 * 8 * len(TENSORS)])
    assert all(get(store, ns, *range(20))), "a whole object needs only its root"
    assert store.verify().sums == 10
    assert store.verify(repair=True).repaired == 10
    close_good(store)


@pytest.mark.parametrize("size", [0, 5 * STRIDE, 40 * STRIDE])
def test_a_segment_cut_short_costs_what_lay_beyond(disk: Path, size: int) -> None:
    store, ns = filled(disk, 40)
    os.truncate(segment_files(disk)[0], size)
    found = get(store, ns, *range(40))
    assert all(found[SLOTS:]), "the other segment is whole"
    assert not any(found[:SLOTS]), "the last tensors lie behind the cut"
    assert store.stats().drives_in_service == 1
    assert eventually(lambda: sum(lookup(store, ns, *range(40))) == 40 - SLOTS)
    assert store.close()
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(40))
    assert all(get(store, ns, *range(40)))
    close_good(store)


def test_a_deleted_segment_is_found_and_its_place_used_again(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "SETTLED", 0.0)
    store, ns = filled(disk, 40)
    assert store.close()
    store = open_store(disk)
    ns = store.attach(namespace())
    segment_files(disk)[0].unlink()
    found = get(store, ns, *range(40))
    assert sum(found) == 40 - SLOTS
    assert lookup(store, ns, *range(40)) == found
    assert eventually(lambda: store.stats().objects == 40 - SLOTS)
    store_pages(store, ns, *range(40))
    assert all(get(store, ns, *range(40)))
    close_good(store)


def test_opening_forgets_segments_whose_files_are_gone(disk: Path) -> None:
    store, ns = filled(disk, 40)
    assert store.close()
    segment_files(disk)[0].unlink()
    store = open_store(disk)
    ns = store.attach(namespace())
    assert sum(lookup(store, ns, *range(40))) == 40 - SLOTS
    close_good(store)


def test_the_whole_directory_deleted_under_a_running_store_makes_it_miss(disk: Path) -> None:
    home = disk / "store"
    store, ns = filled(home)
    shutil.rmtree(home)
    for _ in range(20):
        get(store, ns, *range(20))
        put(store, ns, *range(20, 30))
    assert eventually(lambda: not any(put(store, ns, *range(30, 40))))
    assert not any(lookup(store, ns, *range(30)))
    assert not any(get(store, ns, *range(30)))
    assert eventually(lambda: store.stats().drives_in_service == 0)
    assert value(store, "tutti_call_errors") == 0
    store.close()
    store, ns = filled(home)
    close_good(store)


def test_a_deleted_index_leaves_an_empty_store_that_says_so(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = filled(disk, 40)
    assert store.close()
    for file in disk.glob("index.db*"):
        file.unlink()
    store = open_store(disk)
    assert "starts empty" in caplog.text
    assert segment_files(disk) == [], "nobody knows what is in them"
    assert not any(lookup(store, store.attach(namespace()), *range(40)))
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)


def test_an_index_of_random_bytes_is_refused_with_a_hint(disk: Path) -> None:
    store, _ = filled(disk)
    assert store.close()
    (disk / "index.db").write_bytes(os.urandom(1 << 16))
    with pytest.raises(StoreError, match="index") as caught:
        open_store(disk)
    assert "remove" in caught.value.hint


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_an_index_cut_short_is_refused_or_gives_no_wrong_bytes(disk: Path, share: float) -> None:
    store, _ = filled(disk)
    assert store.close()
    os.truncate(disk / "index.db", int(share * os.stat(disk / "index.db").st_size))
    with contextlib.suppress(StoreError):
        store = open_store(disk)
        ns = store.attach(namespace())
        get(store, ns, *range(20))
        put(store, ns, *range(20, 40))
        get(store, ns, *range(40))
    assert value(store, "tutti_call_errors") == 0
    store.close()


def test_a_segment_of_another_store_is_full_of_misses(disk: Path) -> None:
    store, _ = filled(disk / "one")
    assert store.close()
    other = open_store(disk / "other")
    ns = other.attach(namespace())
    store_pages(other, ns, *range(100, 120))
    assert other.close()
    shutil.copy(segment_files(disk / "other")[0], segment_files(disk / "one")[0])
    store = open_store(disk / "one")
    ns = store.attach(namespace())
    assert store.verify().damaged == 20
    assert not any(get(store, ns, *range(20)))
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_file_that_nobody_knows_is_removed_and_nothing_else(disk: Path) -> None:
    store, _ = filled(disk)
    assert store.close()
    for name in ("000777.seg", ".new-1234", "notes.txt"):
        (disk / "segments" / name).write_bytes(b"x" * MIB)
    (disk / "sums" / "000777.sum").write_bytes(b"x")
    store = open_store(disk)
    assert sorted(os.listdir(disk / "segments")) == [".check", "000001.seg", "notes.txt"]
    assert os.listdir(disk / "sums") == ["000001.sum"]
    assert all(get(store, store.attach(namespace()), *range(20)))
    close_good(store)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": 3}', b"[]", os.urandom(500)])
def test_a_damaged_superblock_is_refused_with_a_hint(disk: Path, content: bytes) -> None:
    store, _ = filled(disk)
    assert store.close()
    (disk / "TUTTI").write_bytes(content)
    with pytest.raises(ForeignStoreError, match="damaged") as caught:
        open_store(disk)
    assert "empty the directory" in caught.value.hint


def test_a_store_copied_to_another_machine_opens_with_all_it_had(disk: Path) -> None:
    store, _ = filled(disk / "here")
    shutil.copytree(disk / "here", disk / "there")
    assert store.close()
    store = open_store(disk / "there")
    assert all(get(store, store.attach(namespace()), *range(20)))
    close_good(store)


@pytest.mark.parametrize("fsync", ["none", "batch", "each"])
def test_what_was_published_is_there_after_the_power_went_between_write_and_sync(disk: Path, fsync: str) -> None:
    """The directory as it is while objects are on their way to the drive: nothing was closed."""
    weather = Weather()
    store = open_store(disk / "running", fsync=fsync, seam=weather)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    put(store, ns, *range(20, 60))
    assert eventually(lambda: weather.stalled)
    shutil.copytree(disk / "running", disk / "after")
    weather.plan.gate.open()
    close_good(store)
    store = open_store(disk / "after")
    ns = store.attach(namespace())
    assert get(store, ns, *range(60)) == [True] * 20 + [False] * 40
    store_pages(store, ns, *range(60))
    assert all(get(store, ns, *range(60)))
    close_good(store)


def test_random_damage_never_gives_wrong_bytes(disk: Path) -> None:
    rng = np.random.default_rng(3)
    store, ns = filled(disk, 100)
    for _ in range(30):
        file = segment_files(disk)[rng.integers(len(segment_files(disk)))]
        at, size = int(rng.integers(0, MIB - 4096)), int(rng.integers(1, 4096))
        _edit(file, at, lambda data: rng.bytes(len(data)), size)
        get(store, ns, *range(100))
    assert store.verify(repair=True).good or store.verify().good
    assert eventually(lambda: lookup(store, ns, *range(100)) == get(store, ns, *range(100)))
    store_pages(store, ns, *range(100))
    assert all(get(store, ns, *range(100)))
    close_good(store)


def test_objects_of_a_lost_row_in_the_index_free_their_slots(disk: Path) -> None:
    """Slots in no state or in two are found, and their segments go."""
    store, ns = filled(disk)
    with sqlite3.connect(disk / "index.db") as connection:
        connection.execute("delete from leased")
        connection.execute("insert into leased select slot, 'somebody' from objects limit 3")
    connection.close()
    report = store.verify()
    assert (report.lost, report.double) == (12, 3)
    report = store.verify(repair=True)
    assert report.repaired == 15
    assert eventually(lambda: store.verify().good)
    store_pages(store, ns, *range(20))
    close_good(store)


def test_nonsense_in_the_index_is_a_miss_of_that_object_found_by_verify_and_removed(disk: Path) -> None:
    """Damage that no lookup of the object itself meets, too: its mark, its id."""
    store, ns = filled(disk)
    with sqlite3.connect(disk / "index.db") as connection:
        slots = [slot for (slot,) in connection.execute("select slot from objects order by slot")]
        for slot, spoiler in zip(
            slots, ("record = x'00'", "mark = 5", "id = x'07'", "id = zeroblob(36)"), strict=False
        ):
            connection.execute(f"update objects set {spoiler} where slot = ?", (slot,))
    connection.close()
    assert sum(get(store, ns, *range(20))) == 16
    assert eventually(lambda: store.stats().objects == 17), "a get that meets nonsense has it removed"
    report = store.verify()
    assert (report.damaged, report.objects) == (1, 16), "this one no get can meet"
    assert store.verify(repair=True).repaired == 1
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_what_was_cleared_comes_free_whoever_cleared_it(disk: Path) -> None:
    """Who clears may die in the middle: others go on."""
    store, ns = filled(disk)
    index = Index(disk / "index.db")
    assert index.clear(ns) == 20
    index.close()
    assert not any(lookup(store, ns, *range(20)))
    assert not any(get(store, ns, *range(20)))
    assert eventually(lambda: store.stats().objects == 0)
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)
