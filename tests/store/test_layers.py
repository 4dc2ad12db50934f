"""Objects that are read by tensors: a layer of many pages at a time, into memory that the CPU reaches and into a
device's."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from tests.engine.cufile import stand_in
from tests.store import kit
from tests.store.kit import TENSORS, Pages, close_good, keys, open_store, put, segment_files, soon, store_pages, value
from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.gds import GdsEngine
from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.geometry import padded
from tutti_sglang.memory import Addresses, Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import HostRows, ObjectStore, Target

CUTS = (slice(0, 2), slice(2, 4))


class Into(Protocol):
    """Where bytes are read to."""

    def open(self, *folders: Path, **changes: Any) -> ObjectStore:
        """A store whose engine reaches it."""

    def target(self, pages: Pages, cut: slice) -> Target:
        """These tensors of the pages."""


class IntoHost:
    """Rows that the CPU reaches."""

    def open(self, *folders: Path, **changes: Any) -> ObjectStore:
        return open_store(*folders, **changes)

    def target(self, pages: Pages, cut: slice) -> Target:
        return HostRows(pages.rows[:, cut])


class IntoDevice:
    """Rows that drives alone reach; somebody else takes the bytes from there."""

    def __init__(self) -> None:
        self._region = Region(kit.MIB)

    def open(self, *folders: Path, **changes: Any) -> ObjectStore:
        settings = kit.config(*folders, **changes)
        self.library, cufile = stand_in()
        engine = GdsEngine(settings.segment_size, 4, settings.max_io, cufile)
        store = ObjectStore(settings, metrics=Metrics(CollectorRegistry()), engine=engine)
        store.register(self._region.address, self._region.size)
        return store

    def target(self, pages: Pages, cut: slice) -> Target:
        return Passed(self._region, pages.rows[:, cut], pages.tensors[cut])


class Passed:
    """What lands in a region, at the places that a drive fills whole, goes on to where it is wanted."""

    padded, reached = True, False

    def __init__(self, region: Region, wanted: Addresses, sizes: tuple[int, ...]) -> None:
        strides, self._wanted = padded(sizes), wanted
        base = object_addresses(region.address, len(wanted), int(strides.sum()))
        self.rows: Addresses = tensor_addresses(base, strides)

    def copy(self, which: npt.NDArray[np.int64], source: Addresses, sizes: npt.NDArray[np.int64]) -> None:
        memory.copy_rows(self._wanted[which], source, sizes)

    def landed(self, which: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], *, summed: bool) -> Sums:
        return checksum.copy_and_sum(self._wanted[which], self.rows[which], sizes)


@pytest.fixture(params=["host", "device"])
def into(request: pytest.FixtureRequest) -> Into:
    if request.param == "device":
        pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")
        return IntoDevice()
    return IntoHost()


def _by_tensors(into: Into, store: ObjectStore, ns: int, *numbers: int) -> list[bool]:
    """Read them cut by cut; each page that came whole is compared."""
    pages = Pages(len(numbers)).wipe()
    with store.layers(ns, keys(*numbers)) as layers:
        for cut in CUTS:
            found = layers.read(cut, into.target(pages, cut), soon())
        kept = layers.close()
        assert not (kept & ~found).any()
    for place, number in enumerate(numbers):
        assert not kept[place] or pages.holds(place, number), f"wrong bytes for page {number}"
    return kept.tolist()


@pytest.mark.parametrize("drives", [1, 3])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_tensors_come_as_they_were_put_from_staging_and_from_the_drives(
    into: Into, tmp_path: Path, drives: int, checksum: str
) -> None:
    folders = [tmp_path / str(each) for each in range(drives)]
    store = into.open(*folders, checksum=checksum)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, *range(20))
    assert all(put(store, ns, 20, 21))  # may still lie in staging
    assert _by_tensors(into, store, ns, 21, 3, 99, 4, 5, 20) == [True, True, False, True, True, True]
    assert value(store, "tutti_bytes", op="read") == 5 * sum(TENSORS)
    close_good(store) if checksum == "on" else store.close()


def test_a_spoiled_tensor_is_found_when_it_is_read_and_the_object_makes_way(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a")
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
        assert layers.read(slice(2, 4), into.target(pages, slice(2, 4)), soon()).tolist() == [True]
        assert layers.read(slice(0, 2), into.target(pages, slice(0, 2)), soon()).tolist() == [False]
        assert layers.read(slice(2, 4), into.target(pages, slice(2, 4)), soon()).tolist() == [False]
    assert value(store, "tutti_missed_objects", reason="checksum") == 1
    assert kit.lookup(store, ns, 1) == [False]
    assert kit.eventually(lambda: store.stats().objects == 0)
    close_good(store)


def test_a_row_of_checksums_that_the_index_does_not_vouch_for_is_not_believed(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1, 2)
    (sums,) = (tmp_path / "a" / "sums").iterdir()
    rows = np.fromfile(sums, dtype="<u8").reshape(-1, len(TENSORS))
    rows[np.flatnonzero(rows.any(axis=1))[0]] += np.uint64(1)
    rows.tofile(sums)
    assert sorted(_by_tensors(into, store, ns, 1, 2)) == [False, True]
    assert kit.eventually(lambda: store.stats().objects == 1)
    close_good(store)


def test_slots_that_are_being_read_by_tensors_are_not_given_away(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a", max_size=kit.MIB)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, *range(kit.SLOTS // 2))
    pages = Pages(kit.SLOTS // 2).wipe()
    with store.layers(ns, keys(*range(kit.SLOTS // 2))) as layers:
        assert layers.read(CUTS[0], into.target(pages, CUTS[0]), soon()).all()
        for number in range(100, 100 + 3 * kit.SLOTS):  # evicts all that was there
            put(store, ns, number)
        assert layers.read(CUTS[1], into.target(pages, CUTS[1]), soon()).all()
        assert layers.close().all()
    assert all(pages.holds(number, number) for number in range(kit.SLOTS // 2))
    close_good(store)


def test_a_read_that_took_longer_than_grace_is_worth_nothing(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a", grace_seconds=0.05)
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1)
    pages = Pages(1).wipe()
    with store.layers(ns, keys(1)) as layers:
        assert layers.read(CUTS[0], into.target(pages, CUTS[0]), soon()).all()
        assert kit.eventually(lambda: layers._reads and layers._reads._read.expired(0.05))
        assert layers.close().tolist() == [False]
    assert value(store, "tutti_missed_objects", reason="grace") == 1
    close_good(store)


def test_a_closed_store_and_an_unknown_namespace_give_nothing(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1)
    assert store.close()
    pages = Pages(1).wipe()
    with store.layers(ns, keys(1)) as layers:
        assert layers.found.tolist() == [False]
        assert layers.read(CUTS[0], into.target(pages, CUTS[0]), soon()).tolist() == [False]


def test_some_of_the_objects_are_read_at_a_time(into: Into, tmp_path: Path) -> None:
    store = into.open(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, 1, 2, 3, 5)
    with store.layers(ns, keys(1, 2, 99, 3, 5)) as layers:
        for first, numbers in ((0, (1, 2)), (2, (99, 3)), (4, (5,))):
            pages = Pages(len(numbers)).wipe()
            for cut in CUTS:
                found = layers.read(cut, into.target(pages, cut), soon(), first)
                assert found.tolist() == [number != 99 for number in numbers]
            assert all(pages.holds(place, number) for place, number in enumerate(numbers) if number != 99)
        assert layers.close().tolist() == [True, True, False, True, True]
    assert value(store, "tutti_bytes", op="read") == 4 * sum(TENSORS)
    close_good(store)


def test_what_the_device_refuses_comes_by_way_of_the_host_and_no_drive_is_blamed(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")
    into = IntoDevice()
    store = into.open(tmp_path / "a")
    ns = store.attach(kit.namespace())
    store_pages(store, ns, *range(8))
    drives = store._parts.drives.values()
    direct = [drive.direct for drive in drives]
    for number, status in enumerate((5022, 5012, 5008, 5027)):  # EINVAL, EFAULT, EOPNOTSUPP, EBADF
        into.library.refuses = status
        assert _by_tensors(into, store, ns, 2 * number, 2 * number + 1) == [True, True]
    into.library.refuses = 0
    assert not into.library.calls
    assert [drive.direct for drive in drives] == direct
    assert all(drive.serves for drive in drives)
    close_good(store)
