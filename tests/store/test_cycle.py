"""The cycle of a segment follows the room on the drives, and never promises room that is not there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.geometry import ALIGNMENT, Geometry
from tutti_sglang.store.cycle import WEIGHT_MAX, spread, weights

SEGMENT = 1 << 20
ROOM = st.dictionaries(st.integers(0, 9), st.integers(-SEGMENT, 64 * SEGMENT), max_size=6)


@given(ROOM)
def test_a_segment_fits_on_every_drive_of_its_cycle(room: dict[int, int]) -> None:
    share = weights(room, SEGMENT)
    assert share.keys() <= room.keys()
    assert all(1 <= weight <= WEIGHT_MAX for weight in share.values())
    if share:
        geometry = Geometry((ALIGNMENT,), 1, spread(share), SEGMENT)
        assert all(geometry.file_size(drive) <= room[drive] for drive in share)
        assert max(geometry.file_size(drive) for drive in share) <= SEGMENT


@given(ROOM)
def test_there_is_a_cycle_whenever_some_drive_has_room_for_a_whole_segment(room: dict[int, int]) -> None:
    assert bool(weights(room, SEGMENT)) >= any(free >= SEGMENT for free in room.values())


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 4), min_size=1, max_size=6))
def test_equal_drives_alternate_and_each_occurs_as_often_as_its_weight(share: dict[int, int]) -> None:
    cycle = spread(share)
    assert {drive: cycle.count(drive) for drive in share} == share
    gaps = {drive: np.diff([at for at, each in enumerate(cycle * 2) if each == drive]) for drive in share}
    assert all(gap.max() - gap.min() <= 1 + len(share) for gap in gaps.values())


def test_examples() -> None:
    assert weights({0: 2 * SEGMENT, 1: SEGMENT}, SEGMENT) == {0: 2, 1: 1}
    assert spread({0: 2, 1: 1}) == (0, 1, 0)
    assert spread({0: 1, 1: 1, 2: 1}) == (0, 1, 2)
    assert weights({0: 100 * SEGMENT, 1: SEGMENT}, SEGMENT) == {0: 1}, "a small drive waits for the large one"
    assert weights({0: SEGMENT - 1}, SEGMENT) == {}
