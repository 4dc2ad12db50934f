"""A plan moves every byte of every object exactly once, in an order that drives like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.engine.batch import IoClass, Operation
from tutti_sglang.geometry import Geometry, Stripe, group_size
from tutti_sglang.store.plan import object_addresses, plan, tensor_addresses
from tutti_sglang.store.slots import slot_ids
from tutti_sglang.store.space import Space

SEGMENT = 4 << 20


@st.composite
def requests(draw: st.DrawFn) -> tuple[Space, dict[int, Geometry], np.ndarray]:
    tensors = tuple(draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=6)))
    geometries = {}
    for number in draw(st.sets(st.integers(1, 1000), min_size=1, max_size=3)):
        cycle = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        geometries[number] = Geometry(tensors, group_size(tensors), cycle, SEGMENT, draw(st.sampled_from(Stripe)))
    every = np.concatenate([slot_ids(n, np.arange(g.slots)) for n, g in geometries.items()])
    chosen = draw(st.lists(st.sampled_from(every.tolist()), max_size=30, unique=True)) if len(every) else []
    return Space(1, tensors), geometries, np.array(chosen, dtype=np.int64)


@given(requests())
def test_each_tensor_of_each_object_is_moved_once_and_no_two_overlap(request) -> None:
    space, geometries, slots = request
    base = object_addresses(1 << 40, len(slots), space.object_size)
    batch, owner = plan(geometries, slots, base, Operation.WRITE, IoClass.WRITE)
    assert len(batch) == len(slots) * len(space.tensors)
    addresses = tensor_addresses(base, space.strides)
    for number in range(len(slots)):
        mine = batch[owner == number]
        order = np.argsort(mine["address"])
        assert mine["address"][order].tolist() == addresses[number].tolist()
        assert mine["length"][order].tolist() == space.strides.tolist()
    for drive in np.unique(batch["drive"]):
        mine = batch[batch["drive"] == drive]
        ends = mine["offset"] + mine["length"]
        assert (mine["offset"][1:] >= ends[:-1]).all(), "sorted, and nothing overlaps"
    assert (batch["offset"] // SEGMENT == (batch["offset"] + batch["length"] - 1) // SEGMENT).all()
    assert (batch["operation"] == Operation.WRITE).all()
    assert (batch["class"] == IoClass.WRITE).all()


def test_a_run_of_pages_is_one_stretch_per_tensor() -> None:
    tensors = (65536,) * 4
    geometry = Geometry(tensors, group_size(tensors), (0,), SEGMENT)
    slots = slot_ids(1, np.arange(geometry.group))
    batch, _ = plan({1: geometry}, slots, object_addresses(0, len(slots), 4 * 65536), Operation.READ, IoClass.DEMAND)
    jumps = np.count_nonzero(np.diff(batch["offset"].astype(np.int64)) != 65536)
    assert jumps == 0, "the whole group is one stretch"


def test_nothing_is_an_empty_plan() -> None:
    assert len(plan({}, np.empty(0, np.int64), np.empty(0, np.uint64), Operation.READ, IoClass.DEMAND).batch) == 0


@pytest.mark.parametrize("tensors", [(1,), (4096, 1), (5000, 4096, 1)])
def test_tensors_of_an_object_follow_each_other_in_staging(tensors: tuple[int, ...]) -> None:
    space = Space(1, tensors)
    addresses = tensor_addresses(object_addresses(4096, 2, space.object_size), space.strides)
    assert addresses[0, 0] == 4096
    assert (np.diff(addresses, axis=1) == space.strides[:-1]).all()
    assert addresses[1, 0] == 4096 + space.object_size
