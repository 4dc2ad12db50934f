"""Tensor-Stripe is a bijection without gaps, for any tensors, group and cycle."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.geometry import ALIGNMENT, GROUP_TARGET, Geometry, Stripe, group_size

geometries = st.builds(
    Geometry,
    tensors=st.lists(st.integers(1, 40_000), min_size=1, max_size=9).map(tuple),
    group=st.sampled_from([1, 2, 4, 8]),
    cycle=st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple),
    segment_size=st.integers(1, 60).map(lambda blocks: blocks * 16 * ALIGNMENT),
    stripe=st.sampled_from(Stripe),
)


def _extents(geometry: Geometry) -> np.ndarray:
    """(slots x T, 3) drive, start, end, sorted."""
    drives, offsets = geometry.locate(np.arange(geometry.slots))
    ends = offsets + geometry.strides
    table = np.stack([drives.ravel().astype(np.int64), offsets.ravel(), ends.ravel()], axis=1)
    return table[np.lexsort((table[:, 1], table[:, 0]))]


@given(geometries)
def test_no_two_tensors_share_a_byte_and_all_lie_in_their_file(geometry: Geometry) -> None:
    table = _extents(geometry)
    same_drive = table[1:, 0] == table[:-1, 0]
    assert (table[1:, 1][same_drive] >= table[:-1, 2][same_drive]).all()
    sizes = np.array([geometry.file_size(drive) for drive in range(4)])
    assert (table[:, 1] >= 0).all()
    assert (table[:, 2] <= sizes[table[:, 0]]).all()
    assert (table[:, 1] % ALIGNMENT == 0).all()
    assert (sizes <= geometry.segment_size).all()


@given(geometries)
def test_whole_periods_leave_no_gap(geometry: Geometry) -> None:
    whole = geometry.groups // len(geometry.cycle) * len(geometry.cycle) * geometry.group
    drives, offsets = geometry.locate(np.arange(whole))
    for drive in set(geometry.cycle):
        used = int(np.broadcast_to(geometry.strides, offsets.shape)[drives == drive].sum())
        periods = whole // geometry.group // len(geometry.cycle)
        assert used == geometry.cycle.count(drive) * periods * geometry.period_size


@given(geometries)
def test_one_more_group_would_not_fit(geometry: Geometry) -> None:
    geometry = dataclasses.replace(geometry, cycle=tuple(range(len(geometry.cycle))))
    _, offsets = geometry.locate(np.arange(geometry.slots, geometry.slots + geometry.group))
    assert (offsets + geometry.strides > geometry.position_size).any()


@given(geometries)
def test_equal_tensors_of_a_group_lie_side_by_side(geometry: Geometry) -> None:
    if not geometry.slots:
        return
    drives, offsets = geometry.locate(np.arange(geometry.group))
    assert (drives == drives[0]).all()
    assert (np.diff(offsets, axis=0) == geometry.strides).all()


@given(geometries)
def test_a_page_uses_every_drive_of_the_cycle_or_one(geometry: Geometry) -> None:
    if not geometry.slots:
        return
    drives, _ = geometry.locate(np.arange(1))
    tensors, cycle = len(geometry.tensors), geometry.cycle
    if geometry.stripe is Stripe.OBJECT:
        assert len(set(drives[0])) == 1
    else:
        assert list(drives[0]) == [cycle[t % len(cycle)] for t in range(tensors)]


def test_tensors_of_following_groups_start_on_the_next_drive() -> None:
    geometry = Geometry((4096,) * 4, 1, (0, 1, 2), 1 << 20)
    drives, _ = geometry.locate(np.arange(3))
    assert drives.tolist() == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]


def test_a_drive_twice_in_the_cycle_takes_twice_the_bytes() -> None:
    geometry = Geometry((4096, 4096, 4096), 2, (0, 0, 1), 1 << 20)
    assert geometry.file_size(0) == 2 * geometry.file_size(1)
    drives, _ = geometry.locate(np.arange(geometry.slots))
    assert abs((drives == 0).sum() - 2 * (drives == 1).sum()) <= 2 * geometry.group * 3


@pytest.mark.parametrize("tensor", [1, 4096, 5000, 16384, 262143, 262144, 10 << 20])
def test_a_group_reaches_the_target_with_the_smallest_power_of_two(tensor: int) -> None:
    group = group_size((tensor, 1))
    stride = -(-tensor // ALIGNMENT) * ALIGNMENT
    assert group & (group - 1) == 0
    assert group * stride >= GROUP_TARGET
    assert group == 1 or group // 2 * stride < GROUP_TARGET
