"""CAP: what the store takes of a disk is what it was told, whatever happened before or happens beside it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.store.kit import (
    MIB,
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
    segment_files,
    soon,
    store_pages,
    value,
)
from tutti_sglang.store import segments

ROOT = Path(__file__).parents[2]
SMALL = (4096,)


def _bytes_on_disk(disk: Path) -> int:
    return sum(os.stat(file).st_blocks * 512 for file in segment_files(disk))


def test_many_objects_are_few_files(disk: Path) -> None:
    """B42: elsewhere a directory of millions of files was full long before the disk, and each lookup listed it."""
    store = open_store(disk)
    ns = store.attach(namespace(tensors=SMALL))
    pages = Pages(500, SMALL)
    listed = set()
    for start in range(0, 1500, 500):
        assert store.put(ns, keys(*range(start, start + 500)), pages.rows, soon()).all()
        assert store.drain(8)
        listed.add(sum(1 for path in disk.rglob("*") if path.suffix not in (".seg", ".sum")))
    assert store.lookup(ns, keys(*range(1500))).all()
    assert len(segment_files(disk)) == -(-1500 * 4096 // MIB)
    assert len(listed) == 1, "something else than segments grows with the objects"
    assert max(listed) < 16
    assert store.close()


def test_what_a_killed_process_left_counts_when_the_store_is_opened_with_less_room(disk: Path) -> None:
    """B45: elsewhere the bytes of an earlier run were unknown to eviction, and the limit was passed."""
    script = f"""
import time
from pathlib import Path
from tests.store.kit import *
store = open_store(Path({str(disk)!r}), max_size=8 * MIB)
store_pages(store, store.attach(namespace()), *range(8 * SLOTS))
print("full", flush=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "full\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert _bytes_on_disk(disk) > 4 * MIB
    store = open_store(disk, max_size=4 * MIB)
    assert _bytes_on_disk(disk) <= 4 * MIB
    ns = store.attach(namespace())
    kept = lookup(store, ns, *range(8 * SLOTS))
    assert sum(kept) >= 3 * SLOTS
    assert get(store, ns, *range(8 * SLOTS)) == kept
    for start in range(1000, 1000 + 8 * SLOTS, SLOTS):
        store_pages(store, ns, *range(start, start + SLOTS))
        assert _bytes_on_disk(disk) <= 4 * MIB
    close_good(store)


def test_what_was_just_written_and_what_is_used_outlives_what_is_not(disk: Path) -> None:
    """B48: elsewhere new data had the age of zero and went first."""
    store = open_store(disk, max_size=8 * MIB)
    ns = store.attach(namespace())
    first, used, newer = range(0, 7 * SLOTS), range(0, 3 * SLOTS), range(1000, 1000 + 3 * SLOTS)
    for start in range(0, len(first), SLOTS):
        store_pages(store, ns, *range(start, start + SLOTS))
    for _ in range(2):
        assert all(get(store, ns, *used))
    for start in range(newer.start, newer.stop, SLOTS // 2):
        store_pages(store, ns, *range(start, start + SLOTS // 2))
        assert all(lookup(store, ns, *range(start, start + SLOTS // 2))), "gone as soon as it was there"
    assert sum(lookup(store, ns, *used)) >= 0.9 * len(used)
    unused = set(first) - set(used)
    assert sum(lookup(store, ns, *unused)) < 0.75 * len(unused)
    close_good(store)


def test_evicting_what_somebody_deleted_is_no_error(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B49: elsewhere the first eviction of a file that was not there took the engine down."""
    monkeypatch.setattr(segments, "SETTLED", 0.0)
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(4 * SLOTS))
    for file in segment_files(disk)[::2]:
        file.unlink()
    for file in (disk / "sums").iterdir():
        file.unlink()
    for start in range(1000, 1000 + 12 * SLOTS, SLOTS):
        put(store, ns, *range(start, start + SLOTS))
        store.drain(8)
    assert value(store, "tutti_call_errors") == 0
    assert eventually(lambda: put(store, ns, 5000) == [True] and store.drain(8) and all(get(store, ns, 5000)))
    assert store.close()
    store = open_store(disk, max_size=4 * MIB)
    assert store.stats().segment_bytes == sum(file.stat().st_size for file in segment_files(disk)) <= 4 * MIB
    close_good(store)


def test_models_share_one_budget(disk: Path) -> None:
    """B102: elsewhere two caches in one directory took twice the limit and threw out each other's entries."""
    store = open_store(disk, max_size=8 * MIB)
    one, other = store.attach(namespace("one")), store.attach(namespace("other"))
    for start in range(0, 8 * SLOTS, SLOTS):
        store_pages(store, one, *range(start, start + SLOTS))
    for start in range(0, 4 * SLOTS, SLOTS):
        store_pages(store, other, *range(start, start + SLOTS))
        assert _bytes_on_disk(disk) <= 8 * MIB
    assert sum(lookup(store, other, *range(4 * SLOTS))) >= 2 * SLOTS, "a newcomer gets room"
    assert sum(lookup(store, one, *range(8 * SLOTS))) >= 2 * SLOTS, "and leaves some"
    assert all(np.array(get(store, one, *range(8 * SLOTS))) == lookup(store, one, *range(8 * SLOTS)))
    close_good(store)
