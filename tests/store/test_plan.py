"""Slot ids name the same objects to the engine as to the index."""

import numpy as np

from tutti_sglang.geometry import Geometry
from tutti_sglang.store.plan import objects_of
from tutti_sglang.store.slots import slot_ids

TENSORS = (4096, 100, 8192)


def test_each_slot_is_found_in_its_segment() -> None:
    geometries = {number: Geometry(TENSORS, 1, (number % 2,), 1 << 20) for number in (9, 2, 5)}
    slots = np.concatenate([slot_ids(5, np.array([3])), slot_ids(2, np.array([0, 7])), slot_ids(9, np.array([1]))])
    objects = objects_of(geometries, slots)
    assert objects.segments.tolist() == [2, 5, 9]
    assert objects.segments[objects.places].tolist() == [5, 2, 2, 9]
    assert objects.numbers.tolist() == [3, 0, 7, 1]
    assert objects.geometries == tuple(geometries[number] for number in (2, 5, 9))
    assert objects.tensors.tolist() == [0, 1, 2]
    assert objects_of(geometries, slots, np.array([1])).strides.tolist() == [4096]
