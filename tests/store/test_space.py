"""Objects lie in memory as on a drive: without gap or overlap, neighbours of a group in one piece for each tensor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.geometry import ALIGNMENT, Geometry, group_size
from tutti_sglang.store.space import Space

TENSORS = st.lists(st.integers(1, 5 * ALIGNMENT), min_size=1, max_size=6).map(tuple)


@given(TENSORS, st.integers(1, 200))
def test_places_are_dense(tensors: tuple[int, ...], objects: int) -> None:
    space = Space(1, tensors)
    places = space.places(objects).astype(np.int64)
    ends = places + space.strides
    order = np.argsort(places, axis=None)
    assert places.ravel()[order[0]] == 0
    assert (places.ravel()[order[1:]] == ends.ravel()[order[:-1]]).all()
    assert ends.max() == objects * space.object_size
    assert (space.places(objects) == places.astype(np.uint64)).all(), "asked again"


@given(TENSORS, st.integers(1, 4))
def test_whole_groups_lie_as_they_will_on_the_drive(tensors: tuple[int, ...], groups: int) -> None:
    space, group = Space(1, tensors), group_size(tensors)
    geometry = Geometry(tensors, group, (0,), 1 << 40)
    _, offsets = geometry.locate(np.arange(groups * group))
    assert (space.places(groups * group).astype(np.int64) == offsets).all()
