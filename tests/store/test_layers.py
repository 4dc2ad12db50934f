"""Objects that are read by tensors: a layer of many pages at a time."""

from pathlib import Path

import numpy as np
import pytest

from tests.store import kit
from tests.store.kit import TENSORS, Pages, close_good, keys, open_store, put, segment_files, soon, store_pages, value
from tutti_sglang.store import ObjectStore

CUTS = (slice(0, 2), slice(2, 4))


def _by_tensors(store: ObjectStore, ns: int, *numbers: int) -> list[bool]:
    """Read them cut by cut; each page that came whole is compared."""
    pages = Pages(len(numbers)).wipe()
    with store.layers(ns, keys(*numbers)) as layers:
        for cut in CUTS:
            found = layers.read(cut, pages.rows[:, cut], soon())
        kept = layers.close()
        assert not (kept & ~found).any()
    for place, number in enumerate(numbers):
        assert not kept[place] or pages.holds(place, number), f"wrong bytes for page {number}"
    return kept.tolist()


@pytest.mark.parametrize("drives", [1, 3])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_tensors_come_as_they_were_put_from_staging_and_from_the_drives(
    tmp_path: Path, drives: int, checksum: str
) -> None:
    folders = [tmp_path / str(each) for each in range(drives)]
    store = open_store(*folders, checksum=checksum)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, *range(20))
    assert all(put(store, ns, 20, 21))  # may still lie in staging
    assert _by_tensors(store, ns, 21, 3, 99, 4, 5, 20) == [True, True, False, True, True, True]
    assert value(store, "tutti_bytes", op="read") == 5 * sum(TENSORS)
    close_good(store) if checksum == "on" else store.close()


def test_a_spoiled_tensor_is_found_when_it_is_read_and_the_object_makes_way(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1)
    (file,) = segment_files(tmp_path / "a")
    content = bytearray(file.read_bytes())
    at = content.index(kit.content(1, sum(TENSORS))[8192:16384].tobytes())
    content[at + 5000] ^= 4
    file.write_bytes(content)
    pages = Pages(1).wipe()
    with store.layers(ns, keys(1)) as layers:
        assert layers.found.tolist() == [True]
        assert layers.read(slice(2, 4), pages.rows[:, 2:4], soon()).tolist() == [True]
        assert layers.read(slice(0, 2), pages.rows[:, 0:2], soon()).tolist() == [False]
        assert layers.read(slice(2, 4), pages.rows[:, 2:4], soon()).tolist() == [False]
    assert value(store, "tutti_missed_objects", reason="checksum") == 1
    assert kit.lookup(store, ns, 1) == [False]
    assert kit.eventually(lambda: store.stats().objects == 0)
    close_good(store)


def test_a_row_of_checksums_that_the_index_does_not_vouch_for_is_not_believed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1, 2)
    (sums,) = (tmp_path / "a" / "sums").iterdir()
    rows = np.fromfile(sums, dtype="<u8").reshape(-1, len(TENSORS))
    rows[np.flatnonzero(rows.any(axis=1))[0]] += np.uint64(1)
    rows.tofile(sums)
    assert sorted(_by_tensors(store, ns, 1, 2)) == [False, True]
    assert kit.eventually(lambda: store.stats().objects == 1)
    close_good(store)


def test_slots_that_are_being_read_by_tensors_are_not_given_away(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", max_size=kit.MIB)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, *range(kit.SLOTS // 2))
    pages = Pages(kit.SLOTS // 2).wipe()
    with store.layers(ns, keys(*range(kit.SLOTS // 2))) as layers:
        assert layers.read(CUTS[0], pages.rows[:, CUTS[0]], soon()).all()
        for number in range(100, 100 + 3 * kit.SLOTS):  # evicts all that was there
            put(store, ns, number)
        assert layers.read(CUTS[1], pages.rows[:, CUTS[1]], soon()).all()
        assert layers.close().all()
    assert all(pages.holds(number, number) for number in range(kit.SLOTS // 2))
    close_good(store)


def test_a_read_that_took_longer_than_grace_is_worth_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", grace_seconds=0.05)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1)
    pages = Pages(1).wipe()
    with store.layers(ns, keys(1)) as layers:
        assert layers.read(CUTS[0], pages.rows[:, CUTS[0]], soon()).all()
        assert kit.eventually(lambda: layers._reads and layers._reads._read.expired(0.05))
        assert layers.close().tolist() == [False]
    assert value(store, "tutti_missed_objects", reason="grace") == 1
    close_good(store)


def test_a_closed_store_and_an_unknown_namespace_give_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1)
    assert store.close()
    pages = Pages(1).wipe()
    with store.layers(ns, keys(1)) as layers:
        assert layers.found.tolist() == [False]
        assert layers.read(CUTS[0], pages.rows[:, CUTS[0]], soon()).tolist() == [False]
