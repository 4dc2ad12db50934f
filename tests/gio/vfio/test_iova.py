"""Bus addresses are given out once, aligned, inside of what the IOMMU has."""

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.gio.vfio import ioctls
from tutti_sglang.gio.vfio.iommu import iova_ranges
from tutti_sglang.gio.vfio.iova import BOTTOM, LARGE, IovaSpace

sizes = st.lists(st.integers(1, 1 << 24), max_size=40)


@given(sizes)
def test_no_two_regions_share_an_address(wanted: list[int]) -> None:
    ranges = [(0, 0xFEDF_FFFF), (0xFEF0_0000, (1 << 34) - 1), (1 << 35, (1 << 35) + (1 << 22) - 1)]
    space = IovaSpace(ranges)
    given_out: list[tuple[int, int]] = []
    for size in wanted:
        start = space.take(size)
        if start is None:
            continue
        assert start % (LARGE if size >= LARGE else 4096) == 0
        assert start >= BOTTOM
        assert any(first <= start and start + size - 1 <= last for first, last in ranges)
        assert all(start + size <= other or other + length <= start for other, length in given_out)
        given_out.append((start, size))


def test_a_full_space_says_so() -> None:
    space = IovaSpace([(BOTTOM, BOTTOM + 8191)])
    assert [space.take(4096), space.take(1), space.take(1)] == [BOTTOM, BOTTOM + 4096, None]
    assert IovaSpace([(0, 0xFFFF)]).take(1) is None


def test_the_kernels_ranges_are_found_among_other_capabilities() -> None:
    head = ioctls.Type1Info(argsz=4096, flags=ioctls.VFIO_IOMMU_INFO_CAPS, cap_offset=24)
    other = bytes(ioctls.CapHeader(id=3, version=1, next=40)) + bytes(8)
    ranges = bytes(ioctls.IovaRange(0, 0xFEDFFFFF)) + bytes(ioctls.IovaRange(0xFEF00000, (1 << 48) - 1))
    capability = bytes(ioctls.CapHeader(id=ioctls.VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, version=1, next=0))
    info = bytes(head) + other + capability + bytes(ctypes.c_uint32(2)) + bytes(4) + ranges
    assert iova_ranges(info.ljust(4096, b"\0")) == [(0, 0xFEDFFFFF), (0xFEF00000, (1 << 48) - 1)]
    assert iova_ranges(bytes(4096)) == [(0, (1 << 39) - 1)]
