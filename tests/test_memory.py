"""Regions are aligned and come and go; rows are copied exactly, by both twins."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_sglang import memory
from tutti_sglang.kernels import native
from tutti_sglang.memory import HUGE_PAGE, PAGE, Region, copy_rows, view, windows
from tutti_sglang.testing.guard import GuardedRegion

Copy = Callable[..., None]
TWINS = {"python": memory._copy_rows, "native": copy_rows}


@pytest.fixture(params=TWINS)
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param == "native" and native.library() is None:
        pytest.skip(native.unavailable_reason())
    return lambda dst, src, sizes: TWINS[request.param](*memory.check_rows(dst, src, sizes))


@pytest.mark.parametrize(
    ("size", "alignment"), [(1, PAGE), (PAGE + 1, PAGE), (HUGE_PAGE, HUGE_PAGE), (3 << 20, HUGE_PAGE)]
)
def test_region_is_zeroed_writable_and_aligned(size: int, alignment: int) -> None:
    region = Region(size)
    assert region.address % alignment == 0
    assert region.size == -(-size // PAGE) * PAGE == len(region.view)
    assert not region.view.any()
    region.view[:] = 7
    assert (view(region.address, region.size) == 7).all()
    region.close()
    region.close()


def test_a_closed_region_lives_as_long_as_arrays_over_it() -> None:
    region = Region(PAGE)
    kept = region.view[:10]
    region.close()
    kept[:] = 5
    assert kept.sum() == 50
    assert region.address == 0


def test_closed_regions_are_unmapped() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE

    before = mapped()
    for _ in range(20):
        region = Region(64 << 20)
        region.view[0] = 1
        region.close()
    assert mapped() - before < 64 << 20


def test_a_forked_child_finds_zeros_and_loses_nothing_of_its_own_when_it_forgets_the_region() -> None:
    region = Region(HUGE_PAGE)
    region.view[:] = 7
    child = os.fork()
    if not child:
        wiped = not region.view.any()
        own = [mmap.mmap(-1, HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)]
        region.close()
        for each in own:
            each[:] = bytes(HUGE_PAGE)  # a signal where it is gone
        os._exit(0 if wiped else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (region.view == 7).all()


def test_view_shares_memory() -> None:
    array = np.arange(256, dtype=np.uint8)
    seen = view(array.ctypes.data + 3, 10)
    assert (seen == array[3:13]).all()
    seen[0] = 99
    assert array[3] == 99


def test_windows_gather_and_scatter_whole_rows() -> None:
    data = np.arange(1000, dtype=np.int64).astype(np.uint8)
    places = np.array([900, 3, 500], dtype=np.uint64)
    rows, index = windows(np.uint64(data.ctypes.data) + places, 5)
    assert (rows[index].view(np.uint8).reshape(3, 5) == [data[p : p + 5] for p in places.tolist()]).all()
    rows[index] = rows[index[::-1]]
    assert data[3] == 3
    assert data[900] == 500 % 256


@pytest.mark.parametrize("sizes", [(1,), (512, 4096), (4095, 65536, 1), (65535, 65537), (300_000, 8)])
@pytest.mark.parametrize("shift", [0, 1, 8, 512])
def test_copy_rows_moves_each_row_and_nothing_else(copy: Copy, sizes: tuple[int, ...], shift: int) -> None:
    rng = np.random.default_rng(len(sizes) + shift)
    room = max(sizes) + 640
    source = rng.integers(256, size=(7, len(sizes), room), dtype=np.uint8)
    target = rng.integers(256, size=source.shape, dtype=np.uint8)
    expected = target.copy()
    order = rng.permutation(7)
    for t, size in enumerate(sizes):
        expected[order, t, shift : shift + size] = source[:, t, :size]
    places = np.arange(source.size // room, dtype=np.uint64).reshape(7, -1) * np.uint64(room)
    copy(places[order] + np.uint64(target.ctypes.data + shift), places + np.uint64(source.ctypes.data), sizes)
    assert (target == expected).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8193), min_size=1, max_size=4), st.integers(0, 5))
def test_copy_rows_stays_inside_its_rows(sizes: tuple[int, ...], rows: int) -> None:
    source, target = GuardedRegion(max(sizes) * len(sizes)), GuardedRegion(max(sizes) * len(sizes))
    source.view[:] = np.arange(source.size) % 251
    ends = np.cumsum(sizes)
    src = np.tile(np.uint64(source.address + source.size) - ends.astype(np.uint64), (rows, 1))
    dst = np.tile(np.uint64(target.address + target.size) - ends.astype(np.uint64), (rows, 1))
    for twin in (memory._copy_rows, copy_rows):
        target.view[:] = 0
        twin(*memory.check_rows(dst, src, sizes))
        moved = int(ends[-1]) if rows else 0
        assert (target.tail(moved) == source.tail(moved)).all()
        assert not target.view[: target.size - moved].any()
    source.close()
    target.close()


def test_copy_rows_of_nothing(copy: Copy) -> None:
    copy(np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64), [1, 2, 3])


@pytest.mark.parametrize("sizes", [(0,), (4, 4)])
def test_shapes_that_do_not_fit_are_a_bug(sizes: tuple[int, ...]) -> None:
    rows = np.zeros((1, 1), np.uint64)
    with pytest.raises(AssertionError):
        copy_rows(rows, rows, sizes)


def test_the_memory_limit_is_what_the_machine_has_or_less() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 1 << 20 < memory.memory_limit() <= total


@pytest.mark.parametrize("groups", [None, "", "1:cpu:/x\n", "0::/no/such/group\n", "0::\n"])
def test_without_a_group_that_limits_it_the_machine_does(
    groups: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cgroup"
    if groups is not None:
        file.write_text(groups)
    monkeypatch.setattr(memory, "Path", lambda path: file if path == "/proc/self/cgroup" else tmp_path / "sys")
    assert memory.memory_limit() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
