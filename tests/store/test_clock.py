"""The file of hits: counted in memory, written by stretches, never in the way."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.store.clock import Clock, places_of
from tutti_sglang.store.eviction import HITS_MAX
from tutti_sglang.store.slots import slot_ids


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def clock(directory: int) -> Iterator[Clock]:
    opened = Clock(directory)
    yield opened
    opened.close()


def test_hits_add_up_to_a_limit(clock: Clock) -> None:
    clock.touch(np.array([3, 70_000, 3]))
    clock.touch(np.array([5]))
    assert not clock.read(0, 10).any(), "nothing is written before the flush"
    clock.flush()
    assert clock.read(0, 8).tolist() == [0, 0, 0, 2, 0, 1, 0, 0]
    assert clock.read(69_999, 3).tolist() == [0, 1, 0]
    for _ in range(3):
        clock.touch(np.array([5, 5]))
        clock.flush()
    assert clock.read(5, 1).tolist() == [HITS_MAX]
    clock.flush()


def test_only_touched_stretches_are_written(clock: Clock, tmp_path: Path) -> None:
    clock.write(0, np.ones(1 << 20, np.uint8))
    other = (tmp_path / "clock").open("r+b")
    clock.touch(np.array([0, 900_000]))
    other.seek(500_000)
    other.write(b"\2")
    other.close()
    clock.flush()
    assert clock.read(500_000, 1).tolist() == [2], "the hits of another process were overwritten"
    assert clock.read(899_999, 2).tolist() == [1, 2]


def test_a_file_that_was_cut_off_or_never_filled_has_no_hits(clock: Clock, tmp_path: Path) -> None:
    clock.write(0, np.ones(100, np.uint8))
    os.truncate(tmp_path / "clock", 50)
    assert clock.read(0, 100).sum() == 50
    assert clock.read(10**9, 3).tolist() == [0, 0, 0]


def test_hits_are_kept_by_close_and_found_by_the_next(directory: int) -> None:
    first = Clock(directory)
    first.touch(np.array([7]))
    first.close()
    first.close()
    second = Clock(directory)
    assert second.read(7, 1).tolist() == [1]
    second.close()


def test_the_file_is_private_and_no_link_is_followed(clock: Clock, directory: int, tmp_path: Path) -> None:
    assert (tmp_path / "clock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "clock")
    with pytest.raises(OSError, match="symbolic"):
        Clock(directory, "link")


def test_memory_is_bounded_without_a_flush(clock: Clock) -> None:
    for _ in range(40):
        clock.touch(np.zeros(1 << 16, np.int64))
    assert sum(len(each) for each in clock._pending) <= 1 << 21


def test_threads_touch_at_once(clock: Clock) -> None:
    def work(start: int) -> None:
        for place in range(start, start + 500):
            clock.touch(np.array([place]))

    threads = [threading.Thread(target=work, args=(500 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        clock.flush()
    clock.flush()
    assert clock.read(0, 2000).tolist() == [1] * 2000


def test_slots_lie_where_their_segment_says() -> None:
    start = {9: 640, 2: 0, 4: 64}
    slots = np.concatenate([slot_ids(4, np.array([0, 63])), slot_ids(3, np.array([1])), slot_ids(9, np.array([2]))])
    assert places_of(slots, start.get).tolist() == [64, 127, 642]
    assert places_of(slot_ids(77, np.array([0])), start.get).tolist() == []
    assert places_of(slots[:0], start.get).tolist() == []
