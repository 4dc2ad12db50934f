"""Segments, free slots and leases: each slot has one state, whoever dies or is late."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.store.index_kit import EVER, GROUP, NAMESPACE, OTHER, SLOTS, check, new_keys, new_records, open_index, stored
from tutti_sglang.errors import StoreError
from tutti_sglang.geometry import Stripe
from tutti_sglang.store import allocation
from tutti_sglang.store.index import Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.slots import NO_SLOT, slots_of


def test_only_the_lessee_of_a_slot_publishes_it(index: Index, space: int) -> None:
    mine, yours = slots_of(index.lease("me", space, 4, EVER)), slots_of(index.lease("you", space, 4, EVER))
    unleased = np.setdiff1d(np.arange(SLOTS) + (1 << 24), np.concatenate([mine, yours]))[:4]
    slots = np.concatenate([mine[:2], yours[:2], unleased])
    assert index.publish("me", space, new_keys(8), new_records(slots)).tolist() == [True] * 2 + [False] * 6
    check(index)


def test_a_freed_slot_is_not_leased_before_its_epoch_has_passed(index: Index, space: int) -> None:
    keys, records = stored(index, space, SLOTS)
    before = index.lookup(space, keys).epoch
    index.delete(space, keys[:KEY_SIZE], records["slot"][:1].astype(np.int64))
    assert len(index.lease("you", space, 1, before)) == 0
    assert index.free_slots(space) == 1
    assert slots_of(index.lease("you", space, 1, index.epoch())).tolist() == records["slot"][:1].tolist()
    check(index)


def test_freed_slots_settle_in_pieces_without_a_lease(
    index: Index, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_DUE", allocation._DUE.replace(str(allocation._SETTLE_MAX), "40"))
    stored(index, space, SLOTS)
    before = index.epoch()
    index.clear(space)
    assert index.purge()
    assert index.settle(before) == 0
    assert [index.settle(index.epoch()) for _ in range(3)] == [40, SLOTS - 40, 0]
    assert index.usage(space).free == SLOTS
    check(index)


def test_a_dead_owner_loses_only_what_it_had_not_published(index: Index, space: int) -> None:
    keys, records = stored(index, space, 6, owner="dead")
    kept, _ = stored(index, space, 2, owner="alive")
    assert index.lessees() == {"dead", "alive"}
    assert index.reclaim("dead") == 2
    assert index.lessees() == {"alive"}
    assert (index.lookup(space, keys).records == records).all()
    assert (index.lookup(space, kept).records["slot"] != NO_SLOT).all()
    check(index)


def test_a_reclaimed_slot_cannot_be_published_by_its_former_owner(index: Index, space: int) -> None:
    slots = slots_of(index.lease("dead", space, 4, EVER))
    index.reclaim("dead")
    again = slots_of(index.lease("you", space, SLOTS, EVER))
    assert set(slots.tolist()) <= set(again.tolist())
    assert not index.publish("dead", space, new_keys(4), new_records(slots)).any()
    assert index.give_back("dead", slots) == 0
    check(index)


def test_a_lease_spans_segments_and_ends_with_the_room(index: Index, space: int) -> None:
    index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    slots = slots_of(index.lease("me", space, SLOTS + 8, EVER))
    assert len(slots) == SLOTS + 8
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS - 8
    assert len(index.lease("me", space, 1, EVER)) == 0
    check(index)


def test_namespaces_do_not_share_segments(index: Index, space: int) -> None:
    other = index.namespace_id(OTHER)
    assert len(index.lease("me", other, 4, EVER)) == 0
    assert index.usage(other).slots == 0


def test_a_dropped_segment_takes_its_objects_and_leases_along_and_its_number_never_comes_back(
    index: Index, space: int
) -> None:
    keys, records = stored(index, space, 8)
    late = slots_of(index.lease("late", space, 4, EVER))
    kept = index.add_segment(space, (1,), GROUP, SLOTS, Stripe.OBJECT)
    index.delete(space, keys[:KEY_SIZE], records["slot"][:1].astype(np.int64))
    assert index.drop_segment(1) == 7
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
    assert not index.publish("late", space, new_keys(4), new_records(late)).any()
    assert index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR) > kept
    check(index)


def test_bytes_of_the_clock_never_overlap_and_are_used_again(index: Index, space: int) -> None:
    for _ in range(3):
        index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    index.drop_segment(2)
    index.add_segment(space, (0,), GROUP, 2 * SLOTS, Stripe.TENSOR)
    index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    spans = sorted((row.clock, row.clock + row.slots) for row in index.segments())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == 6 * SLOTS, "the gap was not used"


def test_a_failed_transaction_leaves_nothing(index: Index, space: int) -> None:
    index._writer.execute("create trigger no before insert on leased begin select raise(abort, 'no'); end")
    with pytest.raises(StoreError):
        index.lease("me", space, 4, EVER)
    index._writer.execute("drop trigger no")
    check(index)
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS


class Machine(RuleBasedStateMachine):
    """Two processes' worth of handles against a dictionary."""

    def __init__(self) -> None:
        super().__init__()

        self.directory = tempfile.TemporaryDirectory()
        self.handles = [open_index(Path(self.directory.name)) for _ in range(2)]
        self.space = self.handles[0].namespace_id(NAMESPACE)
        self.segments: list[int] = []
        self.model: dict[bytes, np.void] = {}
        self.held: dict[int, str] = {}
        self.keys = [bytes([n]) * KEY_SIZE for n in range(12)]
        self.grow(0)

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self.directory.cleanup()

    @rule(which=st.integers(0, 1))
    def grow(self, which: int) -> None:
        if len(self.segments) < 3:
            self.segments.append(self.handles[which].add_segment(self.space, (0,), 2, 6, Stripe.TENSOR))

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), want=st.integers(1, 9), old=st.booleans())
    def lease(self, which: int, owner: str, want: int, old: bool) -> None:
        index = self.handles[which]
        slots = slots_of(index.lease(owner, self.space, want, 0 if old else index.epoch()))
        assert not self.held.keys() & set(slots.tolist())
        assert not {int(record["slot"]) for record in self.model.values()} & set(slots.tolist())
        self.held |= dict.fromkeys(slots.tolist(), owner)

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), keys=st.lists(st.integers(0, 11), max_size=6))
    def publish(self, which: int, owner: str, keys: list[int]) -> None:
        mine = [slot for slot, holder in self.held.items() if holder == owner][: len(keys)]
        chosen = [self.keys[n] for n in keys[: len(mine)]]
        records = new_records(np.array(mine, dtype=np.int64))
        published = self.handles[which].publish(owner, self.space, b"".join(chosen), records)
        for key, record, done in zip(chosen, records, published, strict=True):
            assert done == (key not in self.model)
            if done:
                self.model[key] = record
                del self.held[int(record["slot"])]

    @rule(which=st.integers(0, 1), keys=st.lists(st.integers(0, 11), max_size=6, unique=True), wrong=st.booleans())
    def delete(self, which: int, keys: list[int], wrong: bool) -> None:
        chosen = [self.keys[n] for n in keys]
        slots = [int(self.model[key]["slot"]) if key in self.model else 1 for key in chosen]
        gone = self.handles[which].delete(self.space, b"".join(chosen), np.array(slots, dtype=np.int64) + wrong)
        assert gone.tolist() == [key in self.model and not wrong for key in chosen]
        for key, done in zip(chosen, gone, strict=True):
            if done:
                del self.model[key]

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), some=st.booleans())
    def free(self, which: int, owner: str, some: bool) -> None:
        mine = [slot for slot, holder in self.held.items() if holder == owner]
        if some:
            mine = mine[:2]
            assert self.handles[which].give_back(owner, np.array(mine, dtype=np.int64)) == len(mine)
        else:
            assert self.handles[which].reclaim(owner) == len(mine)
        for slot in mine:
            del self.held[slot]

    @rule(which=st.integers(0, 1))
    def drop(self, which: int) -> None:
        if len(self.segments) > 1:
            segment = self.segments.pop(0)
            gone = {key for key, record in self.model.items() if int(record["slot"]) >> 24 == segment}
            assert self.handles[which].drop_segment(segment) == len(gone)
            self.model = {key: record for key, record in self.model.items() if key not in gone}
            self.held = {slot: owner for slot, owner in self.held.items() if slot >> 24 != segment}

    @invariant()
    def every_slot_has_one_state_and_every_handle_sees_the_model(self) -> None:
        for index in self.handles:
            check(index)
            found = index.lookup(self.space, b"".join(self.keys)).records
            for key, record in zip(self.keys, found, strict=True):
                assert record == self.model[key] if key in self.model else record["slot"] == NO_SLOT


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
