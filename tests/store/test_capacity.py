"""How much the store takes from the disks: exact to the byte, per drive, in proportion, and given back."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    segment_files,
    store_pages,
    value,
)
from tutti_sglang.geometry import Stripe
from tutti_sglang.store import ObjectStore, drives, preallocate
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.growth import Growth

ROOT = Path(__file__).parents[2]


def size_of(drive: Path) -> int:
    """Bytes of its segments. ext4 needs a block more for a file that is half written: that is not counted."""
    found = [os.stat(file) for file in (drive / "segments").glob("*.seg")]
    assert all(0 <= each.st_blocks * 512 - each.st_size <= 4096 for each in found), "extents, and all of them"
    return sum(each.st_size for each in found)


def limit(store: ObjectStore, ordinal: int, size: int) -> None:
    """Let a drive look as if it were this large: max_size is one number for all."""
    store._parts.drives[ordinal].limit = size


@pytest.mark.parametrize("max_size", [MIB, 3 * MIB + 4096, 4 * MIB - 1])
def test_max_size_is_never_exceeded_and_used_up_to_the_last_segment(disk: Path, max_size: int) -> None:
    store = open_store(disk, max_size=max_size)
    ns = store.attach(namespace())
    for start in range(0, 6 * SLOTS, 16):
        put(store, ns, *range(start, start + 16))
        assert store.drain(8)
        assert size_of(disk) <= max_size
    assert size_of(disk) == max_size // MIB * MIB
    assert store.stats().segment_bytes == size_of(disk)
    assert store.stats().capacity == max_size
    assert value(store, "tutti_capacity_bytes", drive="0") == max_size
    close_good(store)


def test_a_segment_has_real_extents(disk: Path) -> None:
    store = open_store(disk)
    store_pages(store, store.attach(namespace()), 1)
    (file,) = segment_files(disk)
    assert os.stat(file).st_size == size_of(disk) == MIB
    close_good(store)


def test_lowering_max_size_drops_the_oldest_and_raising_it_grows_again(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(6 * SLOTS))
    close_good(store)
    before = size_of(disk)
    store = open_store(disk, max_size=3 * MIB)
    assert before > size_of(disk) == 3 * MIB
    ns = store.attach(namespace())
    found = get(store, ns, *range(6 * SLOTS))
    assert any(found[3 * SLOTS :])
    assert not any(found[:SLOTS]), "the oldest goes first"
    close_good(store)
    store = open_store(disk, max_size=8 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(1000, 1000 + 4 * SLOTS))
    assert size_of(disk) > 3 * MIB
    close_good(store)


def test_no_segment_is_made_where_it_would_leave_less_than_min_free_space(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 2 * MIB + 5000
    free = room + 100 * MIB
    monkeypatch.setattr(Drive, "free", lambda drive: free - size_of(disk))
    store = open_store(disk, min_free_space=100 * MIB, max_size=0)
    ns = store.attach(namespace())
    for start in range(0, 8 * SLOTS, 16):
        put(store, ns, *range(start, start + 16))
        assert store.drain(8)
    assert size_of(disk) == 2 * MIB
    assert any(get(store, ns, *range(7 * SLOTS, 8 * SLOTS)))
    assert store.verify().good
    assert store.close()


def test_without_max_size_a_fraction_of_what_is_free_is_used_and_shown(disk: Path) -> None:
    store = open_store(disk, max_size=0)
    drive = store._parts.drives[0]
    assert drive.limit == pytest.approx(drives.DEFAULT_SHARE * drive.free(), rel=0.05)
    assert "GiB" in store.describe()
    close_good(store)


def test_a_disk_that_others_fill_gets_a_segment_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(4 * SLOTS))
    before = size_of(disk)
    monkeypatch.setattr(Drive, "free", lambda drive: -1)
    assert eventually(lambda: size_of(disk) == before - MIB)
    monkeypatch.undo()
    assert eventually(lambda: lookup(store, ns, *range(4 * SLOTS)) == get(store, ns, *range(4 * SLOTS)))
    close_good(store)


def test_a_file_system_without_room_is_no_error_of_the_drive(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(SLOTS))

    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store._growth, "_allocate", full)
        for start in range(100, 200, 10):
            put(store, ns, *range(start, start + 10))
            assert store.drain(8)
        assert sum(get(store, ns, *range(190, 200))) == 10, "it evicts instead"
    assert value(store, "tutti_io_errors", op="create", kind="ENOSPC") > 0
    assert store.stats().drives_in_service == 1
    assert not list((disk / "segments").glob(".new-*"))
    store_pages(store, ns, *range(300, 300 + 2 * SLOTS))
    close_good(store)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_fallocate_zeros_are_written(disk: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def missing(fd: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(preallocate, "fallocate", missing)
    store = open_store(disk)
    store_pages(store, store.attach(namespace()), 1)
    assert size_of(disk) == MIB
    close_good(store)


def test_a_small_disk_that_a_stranger_fills_keeps_working_with_less(disk: Path) -> None:
    """On a real file system of 24 MiB (B47)."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here")
    (disk / "m").mkdir()
    script = f"""
from pathlib import Path
from tests.store.kit import *
home, stranger = Path({str(disk / "m" / "tutti")!r}), Path({str(disk / "m" / "stranger")!r})
store = open_store(home, max_size=20 * MIB, index_dir={str(disk / "index")!r})
ns = store.attach(namespace())
store_pages(store, ns, *range(4 * SLOTS))
stranger.write_bytes(bytes(12 * MIB))
for start in range(1000, 1000 + 20 * SLOTS, 16):
    put(store, ns, *range(start, start + 16))
    store.drain(8)
assert all(get(store, ns, *range(1000 + 20 * SLOTS - 16, 1000 + 20 * SLOTS)))
small = store.stats().segment_bytes
stranger.unlink()
for start in range(5000, 5000 + 20 * SLOTS, 16):
    put(store, ns, *range(start, start + 16))
    store.drain(8)
assert store.stats().segment_bytes > small
close_good(store)
"""
    command = f'mount -t tmpfs -o size=24m none {disk}/m; exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-ec", command, sys.executable, script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stripe", Stripe)
def test_drives_of_unequal_size_are_filled_in_proportion(disk: Path, stripe: Stripe) -> None:
    homes = [disk / "a", disk / "b", disk / "c"]
    sizes = [12 * MIB, 6 * MIB, 3 * MIB]
    store = open_store(*homes, index_dir=str(disk / "index"), stripe=stripe)
    for ordinal, size in enumerate(sizes):
        limit(store, ordinal, size)
    ns = store.attach(namespace())
    for start in range(0, 30 * SLOTS, SLOTS):
        put(store, ns, *range(start, start + SLOTS))
        assert store.drain(8)
        taken = [size_of(home) / size for home, size in zip(homes, sizes, strict=True)]
        assert max(taken) - min(taken) <= 0.7
    assert all(share > 0.7 for share in taken), taken
    assert all(share <= 1 for share in taken), taken
    assert any(get(store, ns, *range(29 * SLOTS, 30 * SLOTS)))
    close_good(store)


def test_a_bad_drive_gets_no_new_segments(disk: Path) -> None:
    store = open_store(disk / "a", disk / "b", index_dir=str(disk / "index"))
    ns = store.attach(namespace())
    store._parts.drives[1].writes.hang("test")
    store._parts.drives[1].writes._next_try = float("inf")
    store_pages(store, ns, *range(100))
    assert segment_files(disk / "a")
    assert not segment_files(disk / "b")
    close_good(store)


def test_stripe_object_loses_one_drives_share_only(disk: Path) -> None:
    for stripe, expected in ((Stripe.OBJECT, SLOTS), (Stripe.TENSOR, 0)):
        home = disk / stripe
        store = open_store(home / "a", home / "b", index_dir=str(home / "index"), stripe=stripe)
        ns = store.attach(namespace())
        store_pages(store, ns, *range(2 * SLOTS))
        for file in segment_files(home / "b"):
            with open(file, "r+b") as handle:
                handle.write(bytes(MIB))
        assert sum(get(store, ns, *range(2 * SLOTS))) == expected
        assert store.close()


def test_a_crash_between_the_steps_of_growth_leaves_nothing_behind(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    space = store._parts.spaces[store.attach(namespace())]

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    for module, name in ((store._parts.index, "add_segment"), (os, "rename"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, crash)
            patch.setattr(Growth, "_remove", lambda *_: None)
            with pytest.raises(Crash):
                store._growth.add(space)
    assert len(os.listdir(disk / "segments")) == 4
    assert store.close()
    store = open_store(disk)
    assert os.listdir(disk / "segments") == [".check"]
    assert store.stats().segment_bytes == 0
    close_good(store)
