"""Eviction of a real index: what is hit stays, slots come free, processes do not get in each other's way."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.geometry import Stripe
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.clock import Clock, places_of
from tutti_sglang.store.index import RECORD_DTYPE, Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.pins import Pins
from tutti_sglang.store.slots import NO_SLOT, slots_of
from tutti_sglang.store.sweeper import Sweeper, stretches

SLOTS, GROUP = 64, 4
EVER = 1 << 62


class Process:
    """What one process of a store has, without drives."""

    def __init__(self, path: Path, model: str = "m") -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.index = Index(path / "index.db", Metrics(CollectorRegistry()))
        self.clock = Clock(self.fd)
        self.sweeper = Sweeper(self.index, self.clock, Pins())
        self.space = self.index.namespace_id(
            Namespace(model=model, weights="w", dtype="bf16", page_size=64, tensors=(4096,), layers=(0, 1))
        )

    def put(self, count: int) -> bytes:
        """Store one prefix of so many pages."""
        slots = slots_of(self.index.lease("me", self.space, count, EVER))
        records = np.ones(count, RECORD_DTYPE)
        records["slot"], records["depth"] = slots[:count], np.arange(count)
        keys = secrets.token_bytes(count * KEY_SIZE)
        assert self.index.publish("me", self.space, keys, records).all()
        self.index.give_back("me", slots[count:])
        return keys

    def there(self, keys: bytes) -> npt.NDArray[np.bool_]:
        return np.asarray(self.index.lookup(self.space, keys).records["slot"] != NO_SLOT)

    def hit(self, keys: bytes) -> None:
        found = self.index.lookup(self.space, keys).records["slot"].astype(np.int64)
        start = {row.id: row.clock for row in self.index.segments()}
        self.clock.touch(places_of(found[found != NO_SLOT], start.get))

    def evict(self, count: int) -> int:
        return self.sweeper.make_room(self.space, count, self.index.segments())

    def close(self) -> None:
        self.clock.close()
        self.index.close()
        os.close(self.fd)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    started = Process(tmp_path)
    for _ in range(3):
        started.index.add_segment(started.space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    yield started
    started.close()


def test_a_window_runs_over_segments_and_round_the_end(process: Process) -> None:
    rows = process.index.segments()
    assert stretches(rows, 60, 70) == [(rows[0], 60, 64), (rows[1], 0, 6)]
    assert stretches(rows, 0, 3 * SLOTS) == [(row, 0, SLOTS) for row in rows]
    assert stretches(rows, -5, 0) == stretches(rows, 500, 600) == []


def test_what_is_hit_stays_and_the_rest_goes(process: Process) -> None:
    kept, gone = process.put(60), process.put(132)
    process.hit(kept)
    assert process.evict(132) == 132
    assert process.there(kept).all()
    assert not process.there(gone).any()
    usage = process.index.usage()
    assert (usage.used, usage.settling) == (60, 132)


def test_exactly_as_many_go_as_were_asked_for(process: Process) -> None:
    keys = process.put(100)
    assert [process.evict(count) for count in (1, 7, 0)] == [1, 7, 0]
    assert process.there(keys).sum() == 92


def test_the_tail_goes_before_the_head(process: Process) -> None:
    keys = process.put(3 * SLOTS)
    process.evict(GROUP)
    there = process.there(keys)
    first_window = np.arange(24)  # an eighth of the slots
    assert there[: 24 - GROUP].all()
    assert not there[first_window[-GROUP:]].any()


def test_everything_goes_in_the_end_even_what_was_hit(process: Process) -> None:
    keys = process.put(3 * SLOTS)
    for _ in range(5):
        process.hit(keys)
    assert process.evict(3 * SLOTS) == 3 * SLOTS
    assert not process.there(keys).any()
    assert process.evict(1) == 0


def test_an_empty_or_unknown_namespace_gives_nothing(process: Process, tmp_path: Path) -> None:
    assert process.evict(5) == 0
    other = Process(tmp_path, "other")
    assert other.evict(5) == 0
    other.close()


def test_only_its_own_segments_give(process: Process, tmp_path: Path) -> None:
    keys = process.put(50)
    other = Process(tmp_path, "other")
    other.index.add_segment(other.space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    mine = other.put(20)
    assert other.evict(50) == 20
    assert process.there(keys).all()
    assert not other.there(mine).any()
    other.close()


def test_two_processes_evict_different_objects(process: Process, tmp_path: Path) -> None:
    keys = process.put(3 * SLOTS)
    second = Process(tmp_path)
    gone = sum(each.evict(10) for each in (process, second) * 5)
    assert gone == 100
    assert process.there(keys).sum() == 92
    second.close()


def test_objects_that_went_otherwise_are_not_counted(process: Process) -> None:
    keys = process.put(3 * SLOTS)
    process.evict(1)
    process.index.clear(process.space)
    while process.index.purge():
        pass
    assert process.evict(10) == 0
    assert not process.there(keys).any()
    more = process.put(5)
    assert process.evict(5) == 5
    assert not process.there(more).any()


def test_a_segment_that_is_dropped_under_the_hand_does_no_harm(process: Process) -> None:
    process.put(3 * SLOTS)
    process.evict(1)
    process.index.drop_segment(1)
    assert process.evict(2 * SLOTS) == 2 * SLOTS
    process.index.drop_segment(2)
    process.index.drop_segment(3)
    assert process.evict(1) == 0


def test_a_hit_while_the_hand_is_there_counts(process: Process) -> None:
    keys = process.put(3 * SLOTS)
    process.evict(1)
    process.hit(keys[: 8 * KEY_SIZE])
    process.evict(16 + 10)
    assert process.there(keys)[:8].all()


def test_without_its_file_eviction_goes_on(process: Process, tmp_path: Path) -> None:
    keys = process.put(3 * SLOTS)
    process.hit(keys)
    process.clock.flush()
    os.truncate(tmp_path / "clock", 0)
    assert process.evict(20) == 20
