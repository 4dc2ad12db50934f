"""The four calls on the CPU twin: what goes in comes out, at its place, by PRP and by SGL."""

import errno

import numpy as np
import pytest

from tests.gio.rigs import Start
from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Faults
from tutti_sglang.gio.rings import Budget
from tutti_sglang.testing.gio_rig import SHAPES, Shape


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_at_their_place(start: Start, name: str, seed: int) -> None:
    shape = SHAPES[name]
    rig = start(shape)
    rng = np.random.default_rng(seed)
    read = rig.random_batch(rng, alignment=4 if shape.sgl else 512)
    assert rig.run(read).tolist() == read["length"].tolist()
    for i in range(len(read)):
        assert (rig.in_memory(read, i) == rig.expected(read, i)).all()
    rig.region.view[:] = rng.integers(256, size=shape.memory, dtype=np.uint8)
    write = rig.random_batch(rng, alignment=4096, operation=1)
    wanted = rig.content.copy()
    for i in range(len(write)):
        wanted[int(write["offset"][i]) :][: int(write["length"][i])] = rig.in_memory(write, i)
    assert rig.run(write).tolist() == write["length"].tolist()
    assert (rig.on_disk() == wanted).all()


def test_a_command_moves_at_most_mdts(start: Start) -> None:
    rig = start(Shape(mdts=16384))
    before = rig.controller.counts()["commands"]
    assert rig.run(rig.batch([0, 0], [16384, 5 * 16384 + 512])).tolist() == [16384, 5 * 16384 + 512]
    assert rig.controller.counts()["commands"] - before == 1 + 6


def test_what_must_not_reach_the_drive_does_not(start: Start) -> None:
    rig = start(Shape(first_block=2048))
    before = rig.controller.counts()["commands"]
    size = 2 * rig.shape.segment
    batch = rig.batch([0, 256, 0, 0, size, size - 4096, 0, 1 << 62], [0, 512, 700, 4096, 4096, 8192, 4096, 4096])
    batch["operation"][3] = 3
    batch["drive"][6] = 1
    batch["length"][7] = 4096
    wanted = [-errno.EINVAL] * 4 + [-errno.EBADF] * 4
    assert rig.run(batch).tolist() == wanted
    outside = rig.batch([0, 0, 0], 8192)
    outside["address"] = [rig.region.address - 4096, rig.region.address + rig.region.size - 4096, 4096]
    assert rig.run(outside).tolist() == [-errno.EFAULT] * 3
    assert rig.controller.counts()["commands"] == before


def test_pieces_of_a_refused_ioctx_are_counted_once_each(start: Start) -> None:
    """An IOCTX with many sub-I/Os ends once, also when none of them reaches the drive."""
    rig = start(Shape(mdts=4096))
    batch = rig.batch([256, 0], [40960, 512])
    for _ in range(20):
        assert rig.run(batch).tolist() == [-errno.EINVAL, 512]


def test_flush_is_one_command(start: Start) -> None:
    rig = start()
    before = rig.controller.counts()["commands"]
    batch = rig.batch([0], 0, abi.FLUSH)
    assert rig.run(batch).tolist() == [0]
    assert rig.controller.counts()["commands"] == before + 1


def test_an_error_is_told_with_its_nvme_status(start: Start) -> None:
    rig = start()
    rig.controller.set_faults(Faults(fail=1.0, status=abi.Status.CAPACITY_EXCEEDED, reads=False))
    ids = rig.issue(rig.batch([0, 4096, 8192], 4096, [0, 1, 0]))
    assert rig.ring.wait_cqe(ids, 60).all()
    assert rig.ring.results(int(ids[0])).tolist() == [4096, -errno.ENOSPC, 4096]
    assert rig.ring.status(int(ids[0])).tolist() == [0, abi.Status.CAPACITY_EXCEEDED, 0]
    assert rig.ring.completions["errors"][ids].tolist() == [1]
    rig.ring.release(ids)
    rig.controller.set_faults(Faults())
    assert rig.run(rig.batch([0], 4096, 1)).tolist() == [4096]


def test_one_bad_piece_spoils_its_ioctx_alone(start: Start) -> None:
    rig = start(Shape(mdts=4096))
    assert rig.controller.detach(1, 60)
    edge = rig.shape.segment
    batch = rig.batch([edge - 8192, edge - 16384, 0], [16384, 8192, 4096])
    assert rig.run(batch).tolist() == [-errno.EBADF, 8192, 4096]


def test_a_lost_command_keeps_its_iocb_until_it_is_answered(start: Start) -> None:
    rig = start(Shape(pairs=1))
    rig.controller.set_faults(Faults(drop=1.0, writes=False))
    budget = Budget(poll_ns=1_000_000)
    batch = rig.batch([0, 4096], 4096, [0, 1], places=[0, 8192])
    ids = rig.issue(batch, budget)
    assert not rig.ring.wait_cqe(ids, 0.2).any()
    assert rig.ring.results(int(ids[0])).tolist() == [-errno.EINPROGRESS, 4096]
    with pytest.raises(AssertionError):
        rig.ring.release(ids)
    rig.controller.set_faults(Faults())
    assert rig.run(rig.batch([8192], places=[16384])).tolist() == [4096]  # its neighbours go on
    assert rig.pairs.states()["late"].sum() == 1
    assert rig.controller.release_dropped() == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    assert rig.ring.results(int(ids[0])).tolist() == [4096, 4096]
    assert (rig.in_memory(batch, 0) == rig.expected(batch, 0)).all()
    assert rig.pairs.states()["late"].sum() == 0
    rig.ring.release(ids)


def test_with_every_slot_lost_a_sub_io_gives_up_in_time(start: Start) -> None:
    rig = start(Shape(pairs=1, log_entries=1))
    rig.controller.set_faults(Faults(drop=1.0))
    lost = rig.issue(rig.batch([0]), Budget(poll_ns=1_000_000))
    assert not rig.ring.wait_cqe(lost, 0.1).any()
    late = rig.issue(rig.batch([4096], places=[8192]), Budget(claim_ns=1_000_000))
    assert rig.ring.wait_cqe(late, 60).all()
    assert rig.ring.results(int(late[0])).tolist() == [-errno.ETIMEDOUT]
    rig.ring.release(late)
    rig.controller.set_faults(Faults())
    rig.controller.release_dropped()
    assert rig.ring.wait_cqe(lost, 60).all()
    rig.ring.release(lost)
    assert rig.run(rig.batch([4096])).tolist() == [4096]


def test_cancel_ends_what_has_not_started(start: Start) -> None:
    rig = start(Shape(pairs=1, log_entries=1))
    rig.controller.set_faults(Faults(drop=1.0))
    ids = rig.issue(rig.batch(np.arange(8) * 4096))
    rig.ring.cancel(ids)
    assert rig.ring.wait_cqe(ids, 5).all() or rig.controller.release_dropped() == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    results = rig.ring.results(int(ids[0]))
    assert set(results.tolist()) <= {4096, -errno.ECANCELED}
    assert (results == 4096).sum() <= 1
    rig.ring.release(ids)


def test_a_full_iocb_completes_once_with_2048_ioctx(start: Start) -> None:
    rig = start(Shape(log_entries=7))
    batch = rig.batch(np.arange(abi.CONTEXTS) * 512, 512)
    ids = rig.issue(batch)
    assert len(ids) == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    assert (rig.ring.results(int(ids[0])) == 512).all()
    assert (rig.region.view[: abi.CONTEXTS * 512] == rig.content[: abi.CONTEXTS * 512]).all()
    rig.ring.release(ids)


def test_a_batch_is_cut_where_an_iocb_is_full(start: Start) -> None:
    rig = start(Shape(mdts=4096))
    lengths = np.array([4096] * 2048 + [4096 * 5000, 4096 * 3192, 4096] + [512] * 3000)
    parts = rig.ring.split(rig.batch(np.zeros(len(lengths)), lengths))
    assert [(part.start, part.stop) for part in parts] == [(0, 2048), (2048, 2050), (2050, 4098), (4098, 5051)]


def test_iocbs_are_reserved_in_runs_and_go_round(start: Start) -> None:
    ring = start(Shape(depth=4)).ring
    first = ring.get_iocb(3)
    assert first is not None
    assert first.tolist() == [0, 1, 2]
    assert ring.get_iocb(2) is None
    assert ring.get_iocb(5) is None
    last = ring.get_iocb(1)
    assert last is not None
    assert last.tolist() == [3]
    ring.release(first)
    ring.release(last)
    wrapped = ring.get_iocb(4)
    assert wrapped is not None
    assert sorted(wrapped.tolist()) == [0, 1, 2, 3]
    ring.release(wrapped[1:3])
    again = ring.get_iocb(2)
    assert again is not None
    assert again.tolist() == wrapped[1:3].tolist()
    ring.release(again)
    ring.release(wrapped[[0, 3]])


def test_nothing_is_left_in_the_movers_memory(start: Start) -> None:
    rig = start()
    rig.run(rig.batch(np.arange(500) * 512, 512))
    states = rig.pairs.states()
    assert not states["in_use"].any()
    assert not states["commands"]["word"].any()
    assert (states["next"] == states["tail"]).all()
    assert (states["doorbells"] <= states["next"]).all()
