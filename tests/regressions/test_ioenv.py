"""IOENV: what kernel, file system and container allow is found out, and memory that suits no drive is no error."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.store.kit import close_good, content, keys, namespace, open_store, soon
from tutti_sglang.memory import Region
from tutti_sglang.testing.guard import GuardedRegion


@pytest.mark.parametrize("shift", [0, 1, 8, 512])
@pytest.mark.parametrize("size", [100, 4095, 4096, 4097])
def test_pages_anywhere_in_memory_reach_the_drive_and_come_back(disk: Path, size: int, shift: int) -> None:
    """B90: elsewhere files stayed empty, since a tensor did not start where direct I/O wants it."""
    store = open_store(disk)
    assert "O_DIRECT" in store.describe()
    ns = store.attach(namespace(tensors=(size, size)))
    region = Region(shift + 20 * size)
    rows = (region.address + shift + np.arange(20).reshape(10, 2) * size).astype(np.uint64)
    pages = region.view[shift : shift + 20 * size].reshape(10, 2 * size)
    for number in range(10):
        pages[number] = content(number, 2 * size)
    assert store.put(ns, keys(*range(10)), rows, soon()).all()
    assert store.drain(8)
    pages[:] = 0
    assert store.get(ns, keys(*range(10)), rows, soon()).all()
    assert all((pages[number] == content(number, 2 * size)).all() for number in range(10))
    close_good(store)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193])
def test_no_byte_beyond_a_page_is_touched(disk: Path, size: int) -> None:
    """B93: elsewhere a whole block was read into a buffer of the exact size, and the heap was overwritten."""
    store = open_store(disk)
    ns = store.attach(namespace(tensors=(size,)))
    region = GuardedRegion(size)
    page = region.tail(size)
    rows = np.array([[page.ctypes.data]], dtype=np.uint64)
    page[:] = content(3, size)
    region.view[: region.size - size] = 0xEE
    assert store.put(ns, keys(3), rows, soon()).all()
    assert store.drain(8)
    page[:] = 0
    assert store.get(ns, keys(3), rows, soon()).all()
    assert (page == content(3, size)).all()
    assert (region.view[: region.size - size] == 0xEE).all()
    close_good(store)
    region.close()


def test_no_file_of_a_drive_is_mapped_into_memory(disk: Path) -> None:
    """B98: elsewhere a mapped file was refused by the file system, or a file cut short killed the process."""
    store = open_store(disk / "drive", index_dir=str(disk / "index"))
    ns = store.attach(namespace(tensors=(4096,)))
    region = Region(4096 * 20)
    rows = (region.address + np.arange(20)[:, None] * 4096).astype(np.uint64)
    assert store.put(ns, keys(*range(20)), rows, soon()).all()
    assert store.drain(8)
    assert store.get(ns, keys(*range(20)), rows, soon()).all()
    mapped = set(re.findall(rf"{disk}/(\S+)", Path("/proc/self/maps").read_text()))
    assert mapped <= {"index/index.db-shm"}, "SQLite's own, on a local file system"
    close_good(store)
