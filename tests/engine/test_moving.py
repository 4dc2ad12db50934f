"""Whole objects are moved to the same end by every engine: pieces reuse their memory, a bad block costs its object
alone, what is in a row is what it should be or is said not to be."""

import errno
import threading
import time

import numpy as np
import pytest

from tutti_sglang import checksum
from tutti_sglang.engine import Engine, IoClass
from tutti_sglang.engine.batch import IN_PROGRESS, Operation
from tutti_sglang.engine.moving import Move, Mover, Read, State, abandon, land, launch, read
from tutti_sglang.engine.plan import Objects, object_addresses, plan, tensor_addresses
from tutti_sglang.engine.system import SYSTEM
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine
from tutti_sglang.errors import EngineError
from tutti_sglang.geometry import Geometry
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_case import PATIENCE, later
from tutti_sglang.testing.faults import EVERY_BLOCK, Fault, FaultPlan, FaultySystem
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig

TENSORS = (3 * BLOCK, BLOCK + 100, 7)
SIZES = np.array(TENSORS, dtype=np.uint64)
GEOMETRY = Geometry(TENSORS, 2, (0, 1), SEGMENT)
OBJECT = GEOMETRY.object_size
ROW = 3 * BLOCK


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture(params=["threads", "uring", "pool"])
def start(request, rig):
    made = []

    def start(faulty: FaultPlan | None = None) -> Engine:
        if request.param == "threads":
            engine: Engine = ThreadsEngine(SEGMENT, 4, 64 << 10, FaultySystem(faulty) if faulty else SYSTEM)
        elif native.library() is None:
            pytest.skip(native.unavailable_reason())
        else:
            faults, pool = faulty.packed() if faulty else None, request.param == "pool"
            engine = UringEngine(SEGMENT, queue_depth=4, max_io=64 << 10, staging=rig.region, faults=faults, pool=pool)
            assert isinstance(engine, Mover)
        made.append((engine, faulty))
        rig.attach(engine)
        return engine

    yield start
    for engine, faults in made:
        if faults:
            faults.gate.open()
        assert engine.close(PATIENCE)


def objects(count: int, tensors: tuple[int, ...] = (0, 1, 2)) -> Objects:
    """Scattered slots of both segments."""
    every = np.random.default_rng(3).permutation(2 * GEOMETRY.slots)[:count]
    places, numbers = np.divmod(every, GEOMETRY.slots)
    return Objects(np.array([0, 1]), (GEOMETRY, GEOMETRY), places, numbers, np.array(tensors))


def request_for(rig: Rig, rows: Region, what: Objects, step: int, lanes: int, **changes: object) -> Read:
    shape = len(what.places), len(what.tensors)
    size = step * int(what.strides.sum())
    target = (rows.address + np.arange(shape[0] * shape[1]) * ROW).reshape(shape).astype(np.uint64)
    starts = [rig.region.address + lane * size for lane in range(lanes)]
    whole = Read(what, target, SIZES[what.tensors], None, starts, step, IoClass.DEMAND, later())
    return whole._replace(**changes)


def expected(rig: Rig, what: Objects, number: int) -> list[np.ndarray]:
    """The tensors of an object, from its files."""
    one = what.some(np.array([number]))
    batch = plan(one, np.zeros(1, np.uint64), Operation.READ, IoClass.DEMAND)
    places = batch[np.argsort(batch["address"])][["drive", "offset"]].tolist()
    return [
        rig.content[drive, at : at + TENSORS[t]] for t, (drive, at) in zip(what.tensors.tolist(), places, strict=True)
    ]


def in_rows(rows: Region, what: Objects, number: int) -> list[np.ndarray]:
    places = (number * len(what.tensors) + np.arange(len(what.tensors))) * ROW
    return [rows.view[at : at + TENSORS[t]] for t, at in zip(what.tensors.tolist(), places.tolist(), strict=True)]


def same(rig: Rig, rows: Region, what: Objects, number: int) -> bool:
    pairs = zip(in_rows(rows, what, number), expected(rig, what, number), strict=True)
    return all((a == b).all() for a, b in pairs)


def room(what: Objects) -> Region:
    return Region(len(what.places) * len(what.tensors) * ROW)


def roots_of(rig: Rig, what: Objects) -> np.ndarray:
    """What the index would say."""
    rows = np.array([[each.ctypes.data for each in expected(rig, what, n)] for n in range(len(what.places))], np.uint64)
    return checksum.roots(checksum.sums(rows, SIZES[what.tensors]))


@pytest.mark.parametrize(("count", "step", "lanes"), [(1, 1, 1), (23, 5, 2), (40, 4, 1), (14, 5, 8), (9, 100, 3)])
@pytest.mark.parametrize("tensors", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("verify", [True, False])
def test_objects_come_through_little_staging(rig, start, count, step, lanes, tensors, verify):
    what = objects(count, tensors)
    rows = room(what)
    roots = roots_of(rig, what) if verify else None
    got = read(start(), request_for(rig, rows, what, step, lanes, roots=roots))
    assert (got.states == State.WHOLE).all()
    assert not len(got.moved.failed)
    assert got.open == {}
    assert got.moved.counts.sum() == count * len(tensors)
    assert got.moved.nbytes.sum() == count * what.strides.sum()
    assert all(same(rig, rows, what, number) for number in range(count))


def mover(engine: Engine) -> Engine:
    if not isinstance(engine, Mover):
        pytest.skip("this engine does not read straight into rows")
    return engine


@pytest.mark.parametrize(("count", "step", "lanes"), [(1, 1, 1), (23, 5, 5), (40, 40, 1)])
@pytest.mark.parametrize("tensors", [(0, 1, 2), (0, 2)])
def test_objects_come_straight_into_their_rows_and_staging_is_left_alone(rig, start, count, step, lanes, tensors):
    what = objects(count, tensors)
    rows, before = room(what), rig.memory.copy()
    got = read(mover(start()), request_for(rig, rows, what, step, lanes, straight=True))
    assert (got.states == State.WHOLE).all()
    assert got.open == {}
    assert got.moved.nbytes.sum() == count * what.strides.sum()
    assert all(same(rig, rows, what, number) for number in range(count))
    assert (rig.memory == before).all()


def test_a_straight_read_ends_when_the_drives_have_and_no_sooner(rig, start):
    what = objects(16)
    rows = room(what)
    batch = plan(what, object_addresses(0, 16, OBJECT), Operation.READ, IoClass.DEMAND)
    begin = int(batch[batch["tag"] == 5][0]["offset"])
    stalled = FaultPlan(
        {Fault.STALL: EVERY_BLOCK}, begin=begin, end=begin + BLOCK, drive=int(batch[batch["tag"] == 5][0]["drive"])
    )
    engine, found = mover(start(stalled)), []
    request = request_for(rig, rows, what, 16, 1, straight=True, deadline=time.monotonic() + 0.2)
    thread = threading.Thread(target=lambda: found.append(read(engine, request)))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    stalled.gate.open()
    thread.join(PATIENCE)
    (got,) = found
    before = rows.view.copy()
    assert got.open == {}
    assert IN_PROGRESS not in got.moved.failed["result"]
    assert all(same(rig, rows, what, number) for number in np.flatnonzero(got.states == State.WHOLE).tolist())
    time.sleep(0.05)
    assert (rows.view == before).all()


@pytest.mark.parametrize("tensors", [(0, 1, 2), (1, 2)])
def test_an_object_with_another_root_is_told_apart(rig, start, tensors):
    what = objects(20, tensors)
    roots = roots_of(rig, what)
    roots[[3, 17]] ^= np.uint64(1 << 40)
    rows = room(what)
    got = read(start(), request_for(rig, rows, what, 4, 2, roots=roots))
    assert np.flatnonzero(got.states == State.ALTERED).tolist() == [3, 17]
    assert (np.delete(got.states, [3, 17]) == State.WHOLE).all()
    assert not len(got.moved.failed)


def test_a_bad_block_costs_its_object_alone(rig, start):
    what = objects(30)
    rows = room(what)
    batch = plan(what, object_addresses(0, 30, OBJECT), Operation.READ, IoClass.DEMAND)
    victim = batch[(batch["tag"] == 15) & (batch["length"] == 2 * BLOCK)][0]
    bad, drive = int(victim["offset"]), int(victim["drive"])
    engine = start(FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=bad, end=bad + BLOCK, drive=drive))
    got = read(engine, request_for(rig, rows, what, 10, 2))
    assert np.flatnonzero(got.states == State.FAILED).tolist() == [15]
    assert got.moved.failed[["offset", "drive", "tag", "result"]].tolist() == [(bad, drive, 15, -errno.EIO)]
    assert not any(row.any() for row in in_rows(rows, what, 15))
    assert all(same(rig, rows, what, number) for number in range(30) if number != 15)


def test_memory_that_a_drive_still_owns_is_told_and_no_row_of_it_is_written(rig, start):
    what = objects(16)
    rows = room(what)
    order = what.order()
    batch = plan(what, object_addresses(0, 16, OBJECT), Operation.READ, IoClass.DEMAND)
    victim = batch[batch["tag"] == order[9]][0]  # in the third piece, which lies in lane 0
    begin = int(victim["offset"])
    stalled = FaultPlan({Fault.STALL: EVERY_BLOCK}, begin=begin, end=begin + BLOCK, drive=int(victim["drive"]))
    engine = start(stalled)
    got = read(engine, request_for(rig, rows, what, 4, 2, deadline=time.monotonic() + 0.3))
    assert list(got.open) == [0]
    assert got.states[order[9]] == State.FAILED
    assert IN_PROGRESS in got.moved.failed["result"]
    assert (engine.wait(got.open[0], 0) == IN_PROGRESS).any()
    assert {*got.moved.failed["result"].tolist()} <= {IN_PROGRESS, -errno.ECANCELED, -errno.ETIMEDOUT}
    before = rows.view.copy()
    stalled.gate.open()
    assert not (engine.wait(got.open[0], PATIENCE) == IN_PROGRESS).any()
    assert (rows.view == before).all()
    assert all(same(rig, rows, what, number) for number in np.flatnonzero(got.states == State.WHOLE).tolist())


def test_after_the_deadline_nothing_starts(rig, start):
    what = objects(8)
    rows = room(what)
    got = read(start(), request_for(rig, rows, what, 4, 1, deadline=time.monotonic() - 1))
    assert (got.states == State.NEVER).all()
    assert not len(got.moved.failed)
    assert not rows.view.any()


def test_a_closed_engine_is_an_error(rig, start):
    engine = start()
    what = objects(1)
    assert engine.close(PATIENCE)
    with pytest.raises(EngineError, match="closed"):
        read(engine, request_for(rig, room(what), what, 1, 1))
    with pytest.raises(EngineError, match="closed"):
        launch(engine, Move(what, np.zeros((1, 3), np.uint64), Operation.READ, IoClass.DEMAND, later()))


def test_an_engine_that_is_closed_meanwhile_still_ends_what_is_under_way(rig, monkeypatch):
    stalled = FaultPlan({Fault.STALL: EVERY_BLOCK})
    engine = ThreadsEngine(SEGMENT, 4, 64 << 10, FaultySystem(stalled))
    rig.attach(engine)
    submit, calls = engine.submit, []

    def closing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise EngineError("The I/O engine is closed")
        return submit(*args)

    monkeypatch.setattr(engine, "submit", closing)
    what = objects(10)
    rows = room(what)
    got = read(engine, request_for(rig, rows, what, 2, 4, deadline=time.monotonic() + 0.2))
    assert not (got.states == State.WHOLE).any()
    assert len(got.open) == 2, "the memory of these two belongs to the drive"
    assert (got.states[what.order()[4:]] == State.NEVER).all()
    stalled.gate.open()
    assert engine.close(PATIENCE)
    with pytest.raises(EngineError):
        read(engine, request_for(rig, rows, what, 2, 1))


@pytest.mark.parametrize(("count", "step", "lanes"), [(1, 1, 1), (23, 5, 2), (14, 5, 8)])
def test_what_is_read_ahead_comes_with_the_request_that_asks_for_it(rig, start, count, step, lanes):
    every = objects(count + 3)
    here, there = every.some(np.arange(3)), every.some(np.arange(3, count + 3))
    rows, roots = room(every), roots_of(rig, there)
    roots[0] ^= np.uint64(1)
    whole = request_for(rig, rows, every, 1, 1)
    now = whole._replace(objects=here, rows=whole.rows[:3])
    size = step * OBJECT
    starts = [rig.region.address + OBJECT + lane * size for lane in range(lanes)]
    ahead = whole._replace(objects=there, rows=None, roots=roots, step=step, lanes=starts)
    engine = start()
    got = read(engine, now, None, ahead)
    assert (got.states == State.WHOLE).all()
    assert (got.begun is not None) == isinstance(engine, Mover)
    got = read(engine, ahead._replace(rows=whole.rows[3:]), got.begun, None)
    assert got.states.tolist() == [State.ALTERED] + [State.WHOLE] * (count - 1)
    assert got.moved.counts.sum() == count * len(TENSORS)
    assert got.open == {}
    assert all(same(rig, rows, every, number) for number in range(count + 3))


def test_what_is_abandoned_keeps_the_memory_that_a_drive_still_owns(rig, start):
    what = objects(16)
    rows = room(what)
    order = what.order()
    batch = plan(what, object_addresses(0, 16, OBJECT), Operation.READ, IoClass.DEMAND)
    victim = batch[batch["tag"] == order[13]][0]  # in the fourth piece, which lies in the second lane of what is ahead
    begin = int(victim["offset"])
    stalled = FaultPlan({Fault.STALL: EVERY_BLOCK}, begin=begin, end=begin + BLOCK, drive=int(victim["drive"]))
    engine = start(stalled)
    if not isinstance(engine, Mover):
        pytest.skip("this engine reads nothing ahead")
    whole = request_for(rig, rows, what, 4, 4)
    now = whole._replace(objects=what.some(order[:8]), rows=whole.rows[order[:8]], lanes=whole.lanes[:2])
    ahead = whole._replace(objects=what.some(order[8:]), rows=None, lanes=whole.lanes[2:])
    got = read(engine, now, None, ahead)
    assert got.begun
    batches = [*got.begun.tickets.values()]
    assert not (engine.wait(batches[0], PATIENCE) == IN_PROGRESS).any()
    left = abandon(engine, got.begun)
    assert list(left) == [1]
    before = rows.view.copy()
    stalled.gate.open()
    assert not (engine.wait(left[1], PATIENCE) == IN_PROGRESS).any()
    assert (rows.view == before).all()


def test_tickets_that_another_thread_claims_meanwhile_are_not_looked_at(rig, start, monkeypatch):
    """Who waits for one looks through all; what was read ahead is the library's again once it is asked for."""
    what, engine = objects(12), start()
    if not isinstance(engine, UringEngine):
        pytest.skip("this engine reads nothing ahead")
    rows = room(what)
    whole = request_for(rig, rows, what, 4, 3)
    now = whole._replace(objects=what.some(np.arange(4)), rows=whole.rows[:4], lanes=whole.lanes[:1])
    ahead = whole._replace(objects=what.some(np.arange(4, 12)), rows=None, lanes=whole.lanes[1:])
    begun = read(engine, now, None, ahead).begun
    assert len(begun.tickets) == 2
    done, claimed = engine.library.tutti_ticket_done, []

    def looking(handle):
        assert handle
        found = done(handle)
        if not claimed:
            claimed.append(True)
            claimed.append(read(engine, ahead._replace(rows=whole.rows[4:]), begun))
        return found

    monkeypatch.setattr(engine.library, "tutti_ticket_done", looking)
    read(engine, now)
    assert (claimed[1].states == State.WHOLE).all()
    assert all(same(rig, rows, what, number) for number in range(12))


def test_what_is_written_is_on_the_drives(rig, start):
    what, engine = objects(24), start()
    base = object_addresses(rig.region.address, 24, OBJECT)
    rig.memory[: 24 * OBJECT] = np.random.default_rng(1).integers(256, size=24 * OBJECT, dtype=np.uint8)
    moved = land(
        engine,
        launch(engine, Move(what, tensor_addresses(base, what.strides), Operation.WRITE, IoClass.WRITE, later())),
        PATIENCE,
    )
    assert not len(moved.failed)
    assert moved.nbytes.sum() == 24 * OBJECT
    for ioctx, number in zip(batch := plan(what, base, Operation.WRITE, IoClass.WRITE), range(len(batch)), strict=True):
        assert (rig.on_disk(batch, number) == rig.in_memory(batch, number)).all(), ioctx


def test_a_write_that_hangs_is_told_and_lands_later(rig, start):
    what = objects(12)
    base = object_addresses(rig.region.address, 12, OBJECT)
    batch = plan(what, base, Operation.WRITE, IoClass.WRITE)
    begin = int(batch[0]["offset"])
    stalled = FaultPlan({Fault.STALL: EVERY_BLOCK}, begin=begin, end=begin + BLOCK, drive=0)
    engine = start(stalled)
    ticket = launch(engine, Move(what, tensor_addresses(base, what.strides), Operation.WRITE, IoClass.WRITE, later()))
    moved = land(engine, ticket, 0.2)
    assert {*moved.failed["result"].tolist()} == {IN_PROGRESS}
    assert int(batch[0]["tag"]) in moved.failed["tag"]
    stalled.gate.open()
    assert not len(land(engine, ticket, PATIENCE).failed)


def test_the_native_engines_move_by_themselves():
    assert issubclass(UringEngine, Mover)
    assert not issubclass(ThreadsEngine, Mover)
