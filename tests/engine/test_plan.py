"""A plan moves every byte of every object exactly once, in an order that drives like; the library plans the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.engine.batch import IoClass, Operation
from tutti_sglang.engine.packed import native_plan
from tutti_sglang.engine.plan import Objects, object_addresses, plan, tensor_addresses
from tutti_sglang.geometry import Geometry, Stripe, group_size
from tutti_sglang.kernels import native

SEGMENT = 4 << 20


@st.composite
def requests(draw: st.DrawFn) -> Objects:
    """Some tensors of some slots of up to three segments with any cycle."""
    sizes = tuple(draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=6)))
    segments = sorted(draw(st.sets(st.integers(0, 1000), min_size=1, max_size=3)))
    cycles = st.lists(st.integers(0, 3), min_size=1, max_size=5)
    groups = st.sampled_from([group_size(sizes), 1, 3])
    stripes = st.sampled_from(Stripe)
    maps = tuple(Geometry(sizes, draw(groups), tuple(draw(cycles)), SEGMENT, draw(stripes)) for _ in segments)
    every = [(place, slot) for place, each in enumerate(maps) for slot in range(each.slots)]
    chosen = draw(st.lists(st.sampled_from(every), max_size=30, unique=True)) if every else []
    places, numbers = np.array(chosen, dtype=np.int64).reshape(-1, 2).T
    tensors = sorted(draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    return Objects(np.array(segments), maps, places, numbers, np.array(tensors))


def bases(objects: Objects) -> np.ndarray:
    return object_addresses(1 << 40, len(objects.places), int(objects.strides.sum()))


@given(requests())
def test_each_tensor_of_each_object_is_moved_once_and_no_two_overlap(objects: Objects) -> None:
    base = bases(objects)
    batch = plan(objects, base, Operation.WRITE, IoClass.WRITE)
    assert len(batch) == len(objects.places) * len(objects.tensors)
    addresses = tensor_addresses(base, objects.strides)
    for number in range(len(objects.places)):
        mine = batch[batch["tag"] == number]
        order = np.argsort(mine["address"])
        assert mine["address"][order].tolist() == addresses[number].tolist()
        assert mine["length"][order].tolist() == objects.strides.tolist()
    for drive in np.unique(batch["drive"]):
        mine = batch[batch["drive"] == drive]
        ends = mine["offset"] + mine["length"]
        assert (mine["offset"][1:] >= ends[:-1]).all(), "sorted, and nothing overlaps"
    assert (batch["offset"] // SEGMENT == (batch["offset"] + batch["length"] - 1) // SEGMENT).all()
    assert (batch["operation"] == Operation.WRITE).all()
    assert (batch["class"] == IoClass.WRITE).all()
    assert (batch["drive"] < objects.drives).all()


@given(requests(), st.sampled_from(Operation), st.sampled_from(IoClass))
def test_the_native_library_plans_the_same(objects: Objects, operation: Operation, klass: IoClass) -> None:
    if native.library() is None:
        pytest.skip(native.unavailable_reason())
    expected = plan(objects, bases(objects), operation, klass)
    assert native_plan(objects, bases(objects), operation, klass).tolist() == expected.tolist()


def test_some_tensors_lie_where_they_lie_in_the_whole_object() -> None:
    sizes = (4096, 9000, 1, 5000)
    geometry = Geometry(sizes, 2, (0, 1, 0), SEGMENT)
    numbers = np.arange(geometry.slots)[:9]
    whole = Objects(np.array([7]), (geometry,), np.zeros_like(numbers), numbers, np.arange(4))
    part = whole._replace(tensors=np.array([1, 3]))
    all_of_it = plan(whole, bases(whole), Operation.READ, IoClass.DEMAND)
    places = {tuple(each) for each in all_of_it[["offset", "drive", "tag"]].tolist()}
    some = plan(part, bases(part), Operation.READ, IoClass.DEMAND)
    assert {tuple(each) for each in some[["offset", "drive", "tag"]].tolist()} < places
    assert sorted({*some["length"].tolist()}) == [8192, 12288]


def test_a_run_of_pages_is_one_stretch_per_tensor() -> None:
    tensors = (65536,) * 4
    geometry = Geometry(tensors, group_size(tensors), (0,), SEGMENT)
    numbers = np.arange(geometry.group)
    objects = Objects(np.array([1]), (geometry,), np.zeros_like(numbers), numbers, np.arange(4))
    batch = plan(objects, bases(objects), Operation.READ, IoClass.DEMAND)
    jumps = np.count_nonzero(np.diff(batch["offset"].astype(np.int64)) != 65536)
    assert jumps == 0, "the whole group is one stretch"


@pytest.mark.parametrize("strides", [(4096,), (4096, 4096), (8192, 4096, 4096)])
def test_tensors_of_an_object_follow_each_other_in_staging(strides: tuple[int, ...]) -> None:
    addresses = tensor_addresses(object_addresses(4096, 2, sum(strides)), np.array(strides))
    assert addresses[0, 0] == 4096
    assert (np.diff(addresses, axis=1) == np.array(strides[:-1])).all()
    assert addresses[1, 0] == 4096 + sum(strides)
