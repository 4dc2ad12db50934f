"""IOCTX that are neighbours on the drive, moved by one command: what it saves, and that each keeps its own result."""

import errno
import os

import numpy as np
import pytest

from tests.gio.rigs import Start
from tutti_sglang.gio.controller import Faults
from tutti_sglang.gio.rings import Batch, Budget
from tutti_sglang.testing.gio_rig import SHAPES, GioRig, Shape


def scattered(rig: GioRig, count: int, size: int = 4096, first: int = 0) -> Batch:
    """Neighbours on the drive that lie anywhere in memory, in places of other sizes."""
    places = np.random.default_rng(count).permutation(count) * (size + 64)
    return rig.batch(first + np.arange(count) * size, size, places=places)


def commands(rig: GioRig) -> int:
    return int(rig.controller.counts()["commands"])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_at_their_place(start: Start, name: str, seed: int) -> None:
    """Of any batch whatever: runs of neighbours, pieces, gaps, both files, other sizes, memory side by side or not."""
    shape = SHAPES[name]
    rig, rng = start(shape), np.random.default_rng(seed)
    block = 1 << shape.block_shift
    lengths = rng.choice(
        [block, block, 2 * block, 4096 // block * block or block, 3 * shape.mdts // 2 // block * block], 60
    )
    ends = np.cumsum(lengths)
    offsets = ends - lengths + np.cumsum(rng.random(60) < 0.1) * block
    inside = (offsets + lengths <= 2 * shape.segment) & (
        offsets // shape.segment == (offsets + lengths - 1) // shape.segment
    )
    alignment = 4 if shape.sgl else 4096
    gaps = np.where(rng.random(60) < 0.5, 0, rng.integers(1, 5, 60) * alignment)
    sizes = lengths if shape.sgl else -(-lengths // 4096) * 4096
    places = np.cumsum(sizes + gaps) - sizes
    inside &= places + lengths <= shape.memory
    chosen = np.flatnonzero(inside)
    read = rig.batch(offsets[chosen], lengths[chosen], places=places[chosen])
    assert rig.run(read, joined=True).tolist() == read["length"].tolist()
    for i in range(len(read)):
        assert (rig.in_memory(read, i) == rig.expected(read, i)).all()
    rig.region.view[:] = rng.integers(256, size=shape.memory, dtype=np.uint8)
    write = rig.batch(offsets[chosen], lengths[chosen], 1, places=places[chosen])
    wanted = rig.content.copy()
    for i in range(len(write)):
        wanted[int(write["offset"][i]) :][: int(write["length"][i])] = rig.in_memory(write, i)
    assert rig.run(write, joined=True).tolist() == write["length"].tolist()
    assert (rig.on_disk() == wanted).all()


def test_neighbours_become_one_command_of_mdts_or_of_so_many_descriptors(start: Start) -> None:
    rig = start(Shape(mdts=1 << 20))
    assert (rig.run(scattered(rig, 200), joined=True) == 4096).all()
    assert commands(rig) == 2, "128 descriptors and 72"
    assert (rig.run(scattered(rig, 200)) == 4096).all()
    assert commands(rig) == 2 + 200
    rig = start(Shape(mdts=65536))
    assert (rig.run(scattered(rig, 40), joined=True) == 4096).all()
    assert commands(rig) == 3, "16 pages each"


def test_without_lists_only_what_lies_side_by_side_in_memory_is_joined(start: Start) -> None:
    rig = start(SHAPES["PRP"])
    together = rig.batch(np.arange(16) * 4096, 4096)
    assert (rig.run(together, joined=True) == 4096).all()
    assert commands(rig) == 1
    apart = rig.batch(np.arange(16) * 4096, 4096, places=np.arange(16)[::-1] * 4096)
    assert (rig.run(apart, joined=True) == 4096).all()
    assert commands(rig) == 1 + 16
    for i in range(16):
        assert (rig.in_memory(apart, i) == rig.expected(apart, i)).all()


def test_no_command_goes_from_one_file_into_the_next(start: Start) -> None:
    rig = start()
    batch = scattered(rig, 4, first=rig.shape.segment - 8192)
    assert (rig.run(batch, joined=True) == 4096).all()
    assert commands(rig) == 2


def test_reads_are_not_joined_with_writes(start: Start) -> None:
    rig = start()
    batch = scattered(rig, 6)
    batch["operation"] = [0, 0, 1, 1, 0, 0]
    assert (rig.run(batch, joined=True) == 4096).all()
    assert commands(rig) == 3


def test_an_error_stays_with_the_one_it_concerns(start: Start) -> None:
    rig = start()
    os.truncate(rig.paths[1], 5 * 4096)  # the drive has nothing from there on
    batch = scattered(rig, 8, first=rig.shape.segment)
    assert rig.run(batch, joined=True).tolist() == [4096] * 5 + [-errno.EIO] * 3
    assert commands(rig) == 1 + 8
    for i in range(5):
        assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()


def test_what_must_not_reach_the_drive_does_not_and_its_neighbours_do(start: Start) -> None:
    rig = start()
    batch = scattered(rig, 5)
    batch["address"][2] = 4096
    assert rig.run(batch, joined=True).tolist() == [4096, 4096, -errno.EFAULT, 4096, 4096]
    assert commands(rig) == 4


def test_a_lost_command_keeps_all_of_its_iocb_until_it_is_answered(start: Start) -> None:
    rig = start(Shape(pairs=1))
    rig.controller.set_faults(Faults(drop=1.0, writes=False))
    batch = scattered(rig, 6)
    batch["operation"][5] = 1
    ids = rig.issue(batch, Budget(poll_ns=1_000_000), joined=True)
    assert not rig.ring.wait_cqe(ids, 0.2).any()
    assert rig.ring.results(int(ids[0])).tolist() == [-errno.EINPROGRESS] * 5 + [4096]
    rig.controller.set_faults(Faults())
    assert rig.controller.release_dropped() == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    assert (rig.ring.results(int(ids[0])) == 4096).all()
    rig.ring.release(ids)
    assert not rig.pairs.states()["late"].any()


def test_what_hangs_one_by_one_after_an_error_does_not_hold_up_the_rest(start: Start) -> None:
    """The command fails; of its parts, which are then asked for alone, some get lost."""
    rig = start(Shape(pairs=1))
    for seed in range(10):
        rig.controller.set_faults(Faults(seed=seed, fail=0.5, drop=0.3))
        ids = rig.issue(scattered(rig, 12), Budget(poll_ns=1_000_000), joined=True)
        while not rig.ring.wait_cqe(ids, 0.05).all():
            rig.controller.release_dropped()
        assert set(rig.ring.results(int(ids[0])).tolist()) <= {4096, -errno.EIO}
        rig.ring.release(ids)


def test_cancelled_before_they_began_all_end(start: Start) -> None:
    rig = start(Shape(pairs=1, log_entries=1))
    rig.controller.set_faults(Faults(drop=1.0))
    ids = rig.issue(scattered(rig, 64), joined=True)
    rig.ring.cancel(ids)
    assert rig.ring.wait_cqe(ids, 5).all() or rig.controller.release_dropped() == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    results = rig.ring.results(int(ids[0]))
    assert set(results.tolist()) <= {4096, -errno.ECANCELED}
    assert (results == 4096).sum() in (0, 16)
    rig.ring.release(ids)


def test_the_lists_of_two_iocbs_do_not_meet(start: Start) -> None:
    rig = start(Shape(mdts=1 << 20, log_entries=6))
    one, other = scattered(rig, 100), scattered(rig, 100, first=100 * 4096)
    other["address"] += np.uint64(2 << 20)
    first = rig.issue(one, joined=True)
    second = rig.issue(other, joined=True)
    assert rig.ring.wait_cqe(np.concatenate([first, second]), 60).all()
    for each in (one, other):
        for i in range(len(each)):
            assert (rig.in_memory(each, i) == rig.expected(each, i)).all()
    rig.ring.release(np.concatenate([first, second]))
