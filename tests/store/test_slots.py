"""Slot arithmetic, the choice of free slots, and the lease of one process."""

import threading

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tutti_sglang.store.slots import (
    NO_SLOT,
    SLOTS_MAX,
    SlotLease,
    choose,
    numbers_of,
    ranges_of,
    segments_of,
    slot_ids,
    slots_of,
)

IDS = st.lists(st.integers(0, 300), max_size=60)


def _array(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_an_id_is_segment_and_number() -> None:
    numbers = _array([0, 5, SLOTS_MAX - 1])
    ids = slot_ids(77, numbers)
    assert (segments_of(ids) == 77).all()
    assert (numbers_of(ids) == numbers).all()
    assert slot_ids(1 << 38, numbers).max() < NO_SLOT


def test_full_segments_do_not_touch() -> None:
    last, first = slot_ids(1, _array([SLOTS_MAX - 1])), slot_ids(2, _array([0]))
    assert len(ranges_of(np.concatenate([last, first]))) == 2


@given(IDS)
def test_ranges_hold_the_same_slots_and_are_the_fewest(ids: list[int]) -> None:
    ranges = ranges_of(_array(ids))
    assert slots_of(ranges).tolist() == sorted(set(ids))
    assert (ranges[1:, 0] > ranges[:-1].sum(axis=1)).all(), "two ranges touch"


@given(arrays.arrays(np.bool_, st.integers(1, 16).map(lambda groups: groups * 4)), st.integers(1, 70))
def test_chosen_slots_are_free_and_whole_groups_come_first(free: npt.NDArray[np.bool_], want: int) -> None:
    chosen = choose(free, 4, want)
    assert free[chosen].all()
    assert (np.diff(chosen) > 0).all()
    whole = free.reshape(-1, 4).all(axis=1)
    taken = np.isin(np.arange(len(free)), chosen).reshape(-1, 4)
    assert min(want, free.sum()) <= len(chosen) <= want + 3
    if len(chosen) > want:
        assert taken[whole].any(axis=1).tolist() == taken[whole].all(axis=1).tolist(), "a whole group was split"
    if not taken[whole].all():
        assert not taken[~whole].any(), "single slots were taken while whole groups were free"


def test_long_runs_of_groups_come_first() -> None:
    free = np.ones(40, dtype=np.bool_)
    free[[5, 19]] = False  # groups 0, 2-3 and 5-9 are whole
    assert choose(free, 4, 8).tolist() == list(range(20, 28))


def test_a_lease_hands_out_the_shortest_range_that_fits() -> None:
    lease = SlotLease()
    lease.add(_array([100, 10, 200, 4]).reshape(-1, 2))
    assert lease.take(3).tolist() == [200, 201, 202]
    assert lease.take(9).tolist() == list(range(100, 109))
    assert lease.take(5).tolist() == [109, 203]
    assert lease.take(1).tolist() == []


def test_a_lease_joins_what_is_consecutive() -> None:
    lease = SlotLease()
    lease.add(_array([8, 4]).reshape(-1, 2))
    lease.add(_array([12, 4]).reshape(-1, 2))
    assert lease.remaining == 8
    assert lease.take(8).tolist() == list(range(8, 16))


@given(IDS, st.lists(st.integers(1, 20), max_size=20))
def test_a_lease_hands_out_each_slot_once(ids: list[int], takes: list[int]) -> None:
    lease = SlotLease()
    lease.add(ranges_of(_array(ids)))
    handed = np.concatenate([*(lease.take(count) for count in takes), lease.take_all()])
    assert sorted(handed.tolist()) == sorted(set(ids))
    assert lease.remaining == 0


def test_threads_share_a_lease() -> None:
    lease = SlotLease()
    lease.add(_array([0, 4000]).reshape(-1, 2))
    handed: list[npt.NDArray[np.int64]] = []

    def work() -> None:
        for _ in range(100):
            handed.append(lease.take(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(np.concatenate(handed).tolist()) == list(range(4000))
