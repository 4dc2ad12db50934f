"""The engine in pure Python passes the suite, and joins transfers as it should."""

import errno
import time

import numpy as np
import pytest

from tutti_sglang.engine import Engine, IoClass, Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_case import PATIENCE, run
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import EVERY_BLOCK, Fault, FaultPlan, FaultySystem
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig


class Recorder:
    """A seam that keeps (offset, pieces, bytes) of each call."""

    def __init__(self, system: Seam = SYSTEM) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._system = system

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        self.calls.append((place.drive_offset, len(iovecs), int(iovecs[:, 1].sum())))
        return self._system.transfer(operation, place, iovecs)


class TestThreadsEngine(EngineSuite):
    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> Engine:
        return ThreadsEngine(SEGMENT, depth, max_io, FaultySystem(plan) if plan else SYSTEM)

    @pytest.fixture
    def recorder(self, rig: Rig):
        recorder = Recorder()
        engine = ThreadsEngine(SEGMENT, 1, 16 * BLOCK, recorder)
        rig.attach(engine)
        yield recorder, engine
        assert engine.close(PATIENCE)

    def test_neighbours_are_one_system_call_up_to_max_io(self, rig: Rig, recorder: tuple[Recorder, Engine]) -> None:
        seam, engine = recorder
        assert (run(engine, rig.batch(np.arange(40) * BLOCK)) == BLOCK).all()
        assert seam.calls == [(at * BLOCK, count, count * BLOCK) for at, count in ((0, 16), (16, 16), (32, 8))]

    def test_a_large_ioctx_is_cut_to_max_io(self, rig: Rig, recorder: tuple[Recorder, Engine]) -> None:
        seam, engine = recorder
        assert run(engine, rig.batch([BLOCK], 20 * BLOCK)).tolist() == [20 * BLOCK]
        assert seam.calls == [(BLOCK, 1, 16 * BLOCK), (17 * BLOCK, 1, 4 * BLOCK)]

    def test_a_failed_call_is_repeated_one_by_one_from_where_it_stopped(self, rig: Rig) -> None:
        plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=2 * BLOCK, end=3 * BLOCK)
        seam = Recorder(FaultySystem(plan))
        engine = ThreadsEngine(SEGMENT, 1, SEGMENT, seam)
        rig.attach(engine)
        assert run(engine, rig.batch(np.arange(4) * BLOCK)).tolist() == [BLOCK, BLOCK, -errno.EIO, BLOCK]
        assert seam.calls == [(0, 4, 4 * BLOCK)] + [(at * BLOCK, 1, BLOCK) for at in range(4)]
        assert engine.close(PATIENCE)

    def test_after_the_deadline_a_failed_call_is_not_repeated(self, rig: Rig) -> None:
        plan = FaultPlan({Fault.ERROR: EVERY_BLOCK, Fault.STALL: 0}, delay=0.0)
        seam = Recorder(_Late(FaultySystem(plan)))
        engine = ThreadsEngine(SEGMENT, 1, SEGMENT, seam)
        rig.attach(engine)
        ticket = engine.submit(rig.batch(np.arange(4) * BLOCK), IoClass.DEMAND, time.monotonic() + 0.3)
        results = engine.wait(ticket, PATIENCE)
        assert set(results.tolist()) <= {-errno.EIO, -errno.ETIMEDOUT}
        assert len(seam.calls) <= 1
        assert engine.close(PATIENCE)

    def test_a_bug_in_a_thread_fails_its_io_and_no_other(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        engine = ThreadsEngine(SEGMENT, 2, BLOCK, _Buggy())
        rig.attach(engine)
        assert run(engine, rig.batch(np.arange(4) * BLOCK)).tolist() == [BLOCK, -errno.EIO, BLOCK, BLOCK]
        assert "met a bug" in caplog.text
        assert engine.close(PATIENCE)


class _Late:
    """Answers after the deadline."""

    def __init__(self, system: Seam) -> None:
        self._system = system

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        time.sleep(0.4)
        return self._system.transfer(operation, place, iovecs)


class _Buggy:
    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        if place.offset == BLOCK:
            raise ZeroDivisionError
        return SYSTEM.transfer(operation, place, iovecs)
