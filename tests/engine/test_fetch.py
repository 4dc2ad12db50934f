"""A whole read comes to the same with every engine: pieces reuse their memory, a bad block costs its object alone."""

import errno
import time

import numpy as np
import pytest

from tutti_sglang import checksum
from tutti_sglang.engine import Engine, IoClass
from tutti_sglang.engine.batch import IN_PROGRESS
from tutti_sglang.engine.fetch import Fetch, Fetching, fetch
from tutti_sglang.engine.system import SYSTEM
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_case import PATIENCE, later
from tutti_sglang.testing.faults import EVERY_BLOCK, Fault, FaultPlan, FaultySystem
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig

SIZES = np.array([3 * BLOCK, BLOCK + 100, 7], dtype=np.uint64)
STRIDES = np.array([3 * BLOCK, 2 * BLOCK, BLOCK])
OBJECT = int(STRIDES.sum())
TENSORS = len(SIZES)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture(params=["threads", "uring", "pool"])
def start(request, rig):
    made = []

    def start(plan: FaultPlan | None = None) -> Engine:
        if request.param == "threads":
            engine: Engine = ThreadsEngine(SEGMENT, 4, 64 << 10, FaultySystem(plan) if plan else SYSTEM)
        elif native.library() is None:
            pytest.skip(native.unavailable_reason())
        else:
            faults, pool = plan.packed() if plan else None, request.param == "pool"
            engine = UringEngine(SEGMENT, queue_depth=4, max_io=64 << 10, staging=rig.region, faults=faults, pool=pool)
            assert isinstance(engine, Fetching)
        made.append((engine, plan))
        rig.attach(engine)
        return engine

    yield start
    for engine, plan in made:
        if plan:
            plan.gate.open()
        assert engine.close(PATIENCE)


def request_for(rig: Rig, rows: Region, pieces: list[int], lanes: int, **changes: object) -> Fetch:
    """Objects that lie one after the other on drive 0 and, every other one, on drive 1; `pieces`: objects of each."""
    count, room = sum(pieces), max(pieces) * OBJECT
    objects = np.cumsum([0, *pieces])
    piece = np.repeat(np.arange(len(pieces)), pieces)
    within = np.arange(count) - objects[piece]
    base = rig.region.address + piece % lanes * room + within * OBJECT
    starts = np.cumsum(STRIDES) - STRIDES
    source = (base[:, None] + starts).astype(np.uint64)
    offsets = (np.arange(count) // 2 * OBJECT)[:, None] + starts
    batch = rig.batch(offsets.ravel(), np.tile(STRIDES, count), drives=np.repeat(np.arange(count) % 2, TENSORS))
    batch["address"] = source.ravel()
    owner = np.repeat(np.arange(count), TENSORS)
    shuffled = np.concatenate(
        [
            np.random.default_rng(7).permutation(np.arange(a, b))
            for a, b in np.lib.stride_tricks.sliding_window_view(objects * TENSORS, 2)
        ]
    )
    target = (rows.address + np.arange(count * TENSORS) * 3 * BLOCK).reshape(count, TENSORS).astype(np.uint64)
    whole = Fetch(
        batch[shuffled],
        owner[shuffled],
        objects * TENSORS,
        objects,
        target,
        source,
        SIZES,
        lanes,
        IoClass.DEMAND,
        later(),
    )
    return whole._replace(**changes)


def expected(rig: Rig, number: int) -> list[np.ndarray]:
    """The tensors of an object, from its file."""
    starts = number // 2 * OBJECT + np.cumsum(STRIDES) - STRIDES
    return [
        rig.content[number % 2, at : at + int(size)] for at, size in zip(starts.tolist(), SIZES.tolist(), strict=True)
    ]


def in_rows(rows: Region, number: int) -> list[np.ndarray]:
    places = (number * TENSORS + np.arange(TENSORS)) * 3 * BLOCK
    return [rows.view[at : at + int(size)] for at, size in zip(places.tolist(), SIZES.tolist(), strict=True)]


def same(rig: Rig, rows: Region, number: int) -> bool:
    return all((a == b).all() for a, b in zip(in_rows(rows, number), expected(rig, number), strict=True))


@pytest.mark.parametrize(("pieces", "lanes"), [([1], 1), ([5, 5, 5, 5, 3], 2), ([4] * 10, 1), ([2, 7, 1, 4], 8)])
@pytest.mark.parametrize("sums", [True, False])
def test_objects_come_through_little_staging(rig, start, pieces, lanes, sums):
    rows = Region(sum(pieces) * TENSORS * 3 * BLOCK)
    request = request_for(rig, rows, pieces, lanes, sums=sums)
    fetched = fetch(start(), request)
    assert (fetched.results == request.batch["length"]).all()
    assert fetched.copied.all()
    assert fetched.open == []
    assert all(same(rig, rows, number) for number in range(sum(pieces)))
    if sums:
        assert (fetched.sums == checksum.sums(request.target, SIZES)).all()


def test_a_bad_block_costs_its_object_alone(rig, start):
    rows = Region(30 * TENSORS * 3 * BLOCK)
    bad = 7 * OBJECT + 3 * BLOCK
    engine = start(FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=bad, end=bad + BLOCK, drive=1))
    request = request_for(rig, rows, [10, 10, 10], 2)
    fetched = fetch(engine, request)
    assert np.flatnonzero(~fetched.copied).tolist() == [15]
    assert sorted(set(fetched.results.tolist())) == [-errno.EIO, BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert not any(row.any() for row in in_rows(rows, 15))
    assert all(same(rig, rows, number) for number in range(30) if number != 15)


def test_memory_that_a_drive_still_owns_is_told_and_no_row_of_it_is_written(rig, start):
    rows = Region(16 * TENSORS * 3 * BLOCK)
    plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, begin=5 * OBJECT, end=6 * OBJECT, drive=0)
    engine = start(plan)
    request = request_for(rig, rows, [4, 4, 4, 4], 2, deadline=time.monotonic() + 0.3)
    fetched = fetch(engine, request)
    assert len(fetched.open) == 1
    assert not fetched.copied[10]
    assert (engine.wait(fetched.open[0], 0) == IN_PROGRESS).any()
    assert {*fetched.results[fetched.results < 0].tolist()} <= {IN_PROGRESS, -errno.ECANCELED, -errno.ETIMEDOUT}
    before = rows.view.copy()
    plan.gate.open()
    assert not (engine.wait(fetched.open[0], PATIENCE) == IN_PROGRESS).any()
    assert (rows.view == before).all()
    assert all(same(rig, rows, number) for number in np.flatnonzero(fetched.copied).tolist())


def test_after_the_deadline_nothing_starts(rig, start):
    rows = Region(8 * TENSORS * 3 * BLOCK)
    fetched = fetch(start(), request_for(rig, rows, [4, 4], 1, deadline=time.monotonic() - 1))
    assert (fetched.results == -errno.ETIMEDOUT).all()
    assert not fetched.copied.any()
    assert not rows.view.any()


def test_a_closed_engine_is_an_error(rig, start):
    engine = start()
    assert engine.close(PATIENCE)
    with pytest.raises(EngineError, match="closed"):
        fetch(engine, request_for(rig, Region(TENSORS * 3 * BLOCK), [1], 1))


def test_an_engine_that_is_closed_meanwhile_still_ends_what_is_under_way(rig, monkeypatch):
    plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    engine = ThreadsEngine(SEGMENT, 4, 64 << 10, FaultySystem(plan))
    rig.attach(engine)
    submit, calls = engine.submit, []

    def closing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise EngineError("The I/O engine is closed")
        return submit(*args)

    monkeypatch.setattr(engine, "submit", closing)
    rows = Region(10 * TENSORS * 3 * BLOCK)
    fetched = fetch(engine, request_for(rig, rows, [2] * 5, 4, deadline=time.monotonic() + 0.2))
    assert not fetched.copied.any()
    assert len(fetched.open) == 2, "the memory of these two belongs to the drive"
    assert (fetched.results[4 * TENSORS :] == -errno.ETIMEDOUT).all()
    plan.gate.open()
    assert engine.close(PATIENCE)
    with pytest.raises(EngineError):
        fetch(engine, request_for(rig, rows, [2], 1))
